// Server: wires the rooms (device -> model store -> engine -> services) and owns the order of start
// and stop.
//
// Start: listen with health NOT_SERVING, load the models, then SERVING. Stop: NOT_SERVING, drain
// delay, no new calls, calls in flight, engine, weights.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/kernels.h"
#include "server/config/options.h"

namespace awqd {

// Like OpenDevice of kernels/kernels.h; tests replace it with devices that fail on demand. Called
// on several threads at a time.
using DeviceOpener = std::function<absl::StatusOr<std::unique_ptr<Device>>(
    absl::string_view spec, const DeviceOptions& options, std::string* why)>;

class Server {
 public:
  // Opens the device, reads the repository's directory, listens, and starts loading on a thread of
  // its own. An error is one line for the operator.
  static absl::StatusOr<std::unique_ptr<Server>> Create(
      const Options& options, const DeviceOpener& open_device = OpenDevice);

  virtual ~Server() = default;

  virtual int port() const = 0;

  // Blocks until `stop_fd` is readable (OK), all models were tried and some failed to load (unless
  // Options::keep_going), or every device has failed; then stops in order. Called once.
  virtual absl::Status Run(int stop_fd) = 0;

  // The work that would be lost if the process ended now.
  struct Unfinished {
    int64_t calls = 0;     // in flight
    bool loading = false;  // the models of the start are being loaded
  };
  // May be called from any thread.
  virtual Unfinished unfinished() const = 0;
};

}  // namespace awqd
