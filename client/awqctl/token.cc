// awqctl token: makes a token, and the line by which a server knows it.
#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/awqctl/commands.h"
#include "client/files/output_file.h"
#include "client/remove_on_signal.h"
#include "kernels/base/status.h"
#include "nlohmann/json.hpp"

namespace awqd::awqctl {
namespace {

constexpr size_t kRandomBytes = 32;
// Tells people, and programs that look for secrets where none should be, what it is.
constexpr char kPrefix[] = "awqd_";

std::string Hex(const unsigned char* bytes, size_t size) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes), size});
}

constexpr mode_t kOwnerOnly = 0600;

// Makes the file `path`, which nobody but its owner may read. Nothing is left of it after an error.
absl::Status WriteSecret(const std::string& path, absl::string_view text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kOwnerOnly);
  if (fd < 0) return client::FileError("write", path);
  const client::RemoveOnSignal on_signal(path);
  client::OutputFile file(path, fd);
  absl::Status status = file.Append(text);
  if (status.ok()) status = file.Close();
  if (!status.ok()) unlink(path.c_str());
  return status;
}

// Adds a line to the file `path`, which is made where there is none. A last line that has no end
// gets one.
absl::Status AppendLine(const std::string& path, absl::string_view line) {
  const int fd = open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, kOwnerOnly);
  if (fd < 0) return client::FileError("write", path);
  client::OutputFile file(path, fd);
  char last = '\n';
  struct stat facts = {};
  if (fstat(fd, &facts) == 0 && facts.st_size > 0 && pread(fd, &last, 1, facts.st_size - 1) != 1) {
    return client::FileError("read", path);
  }
  // One write: whoever reads the file meanwhile finds a whole line.
  AWQD_RETURN_IF_ERROR(file.Append(absl::StrCat(last == '\n' ? "" : "\n", line, "\n")));
  return file.Close();
}

}  // namespace

absl::StatusOr<int> Token(const Flags& flags, Console& console) {
  std::array<unsigned char, kRandomBytes> random = {};
  if (RAND_bytes(random.data(), static_cast<int>(random.size())) != 1) {
    return absl::UnavailableError("no random numbers from the system");
  }
  const std::string token = absl::StrCat(kPrefix, Hex(random.data(), random.size()));
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest = {};
  unsigned int size = 0;
  if (EVP_Digest(token.data(), token.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1) {
    return absl::UnavailableError("OpenSSL has no SHA-256");
  }
  const std::string line =
      absl::StrCat(flags.token.name, " ", flags.token.roles, " sha256:", Hex(digest.data(), size));
  const std::string &out = flags.token.out, &append = flags.token.append;
  if (!out.empty()) AWQD_RETURN_IF_ERROR(WriteSecret(out, token + "\n"));
  if (!append.empty()) {
    const absl::Status status = AppendLine(append, line);
    if (!status.ok() && !out.empty()) unlink(out.c_str());  // no server would take it
    AWQD_RETURN_IF_ERROR(status);
  }
  if (flags.json) {
    // A token that has a file is shown nowhere else.
    nlohmann::ordered_json json;
    if (out.empty()) json["token"] = token;
    json["line"] = line;
    console.out << json.dump() << "\n";
    return kOk;
  }
  if (out.empty()) console.out << token << "\n";
  if (!append.empty()) {
    console.err << "added " << flags.token.name << " to " << append << "\n";
    return kOk;
  }
  // Comments, so that all of it may be appended to the server's file.
  console.err << "# The token of " << flags.token.name
              << (out.empty() ? " was shown once; its user keeps it in a file (--token_file).\n"
                              : absl::StrCat(" is in ", out, ".\n"))
              << line << "\n";
  return kOk;
}

}  // namespace awqd::awqctl
