// WrapDevices: what a test gives a server to open devices with, so that each is another device's face.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernels/kernels.h"
#include "server/server.h"

namespace awqd {

// `wrap` gets each device that the server opens, and returns the one that the server sees.
inline DeviceOpener WrapDevices(
    std::function<std::unique_ptr<Device>(std::unique_ptr<Device>)> wrap) {
  return [wrap = std::move(wrap)](absl::string_view spec, const DeviceOptions& options,
                                  std::string* why) -> absl::StatusOr<std::unique_ptr<Device>> {
    absl::StatusOr<std::unique_ptr<Device>> inner = OpenDevice(spec, options, why);
    if (!inner.ok()) return inner.status();
    return wrap(*std::move(inner));
  };
}

}  // namespace awqd
