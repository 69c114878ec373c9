// awqd with a CPU that passes for a GPU: the memory that clients share is of memfds, as fake_cuda.cc
// makes it. Takes awqd's flags, and ends with SIGTERM.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "server/config/options.h"
#include "server/obs/logging.h"
#include "server/server.h"
#include "tests/server/wrap_devices.h"
#include "tests/testing/wrapped_device.h"

namespace awqd {
namespace {

int g_stop[2];  // readable at its first end once SIGTERM came

int FailWith(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}

int RunServer(int argc, char** argv) {
  if (pipe(g_stop) != 0) return 1;
  std::signal(SIGTERM, [](int) { (void)!write(g_stop[1], "x", 1); });
  const auto line = ParseCommandLine(argc, argv);
  if (!line.ok()) return FailWith(line.status());
  obs::SetUpLogging(line->options.log_level, line->options.log_format);
  const auto wrap = [](std::unique_ptr<Device> inner) {
    return std::make_unique<testing::WrappedDevice>(std::move(inner), /*host_addressable=*/false);
  };
  const auto server = Server::Create(line->options, WrapDevices(wrap));
  if (!server.ok()) return FailWith(server.status());
  const absl::Status status = (*server)->Run(g_stop[0]);
  return status.ok() ? 0 : FailWith(status);
}

}  // namespace
}  // namespace awqd

int main(int argc, char** argv) { return awqd::RunServer(argc, argv); }
