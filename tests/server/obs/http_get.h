// HttpGet: gets a page of a server on this machine, over a plain socket.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/unique_fd.h"

namespace awqd::testing {

// A socket that listens on a free port of 127.0.0.1.
inline std::vector<UniqueFd> ListenOnLoopback() {
  std::vector<UniqueFd> out;
  out.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = out.front().get();
  const bool listens =
      bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      listen(fd, SOMAXCONN) == 0;
  return listens ? std::move(out) : std::vector<UniqueFd>();
}

struct HttpPage {
  int code = 0;  // 0: no answer
  std::string head, body;
};

// `headers`: additional header lines, each ended by "\\r\\n".
inline HttpPage HttpGet(int port, const std::string& path, const std::string& method = "GET",
                        const std::string& headers = "") {
  HttpPage page;
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string all;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request =
        absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n",
                     headers, "\r\n");
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
      char buffer[4096];
      for (ssize_t got = 0; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
        all.append(buffer, static_cast<size_t>(got));
      }
    }
  }
  close(fd);
  const size_t end = all.find("\r\n\r\n");
  if (end == std::string::npos) return page;
  page.head = all.substr(0, end);
  page.body = all.substr(end + 4);
  if (!absl::SimpleAtoi(page.head.substr(9, 3), &page.code)) page.code = 0;
  return page;
}

}  // namespace awqd::testing
