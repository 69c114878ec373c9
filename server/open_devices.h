// The devices of --device and their engines, which are made at the same time: a GPU takes up to a
// second.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "server/config/options.h"
#include "server/engine/engine.h"
#include "server/server.h"

namespace awqd {

struct OpenedDevice {
  std::unique_ptr<Device> device;
  std::string why;      // it was chosen
  bool healthy = true;  // as it was last seen
};

// Every device of the option, in its order. Fails with the first of that order that cannot be
// opened; INVALID_ARGUMENT when one is listed under two spellings.
absl::StatusOr<std::vector<OpenedDevice>> OpenDevices(const Options& options,
                                                      const DeviceOpener& open_device);

// One for each device, in their order. The devices outlive them.
absl::StatusOr<std::vector<std::unique_ptr<engine::Engine>>> MakeEngines(
    const std::vector<Device*>& devices, const engine::EngineOptions& options);

}  // namespace awqd
