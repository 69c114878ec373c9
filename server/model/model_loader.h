// LoadModel: one checkpoint -> weights on devices, one weight at a time.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "server/model/model_folders.h"
#include "server/model/model_store.h"
#include "server/model/progress.h"

namespace awqd::model {

struct LoadTarget {
  std::vector<Device*> devices;  // one or more
  bool cut = false;              // each weight's columns among them, instead of whole on each
};

// `version` of the result is 0: the store counts. Peak host memory is about three times the
// largest weight's packed size. On an error nothing stays allocated on any device. UNAVAILABLE once
// `cancelled`.
absl::StatusOr<std::shared_ptr<Model>> LoadModel(const ModelFolder& folder, const std::string& name,
                                                 const LoadTarget& target,
                                                 const std::atomic<bool>& cancelled,
                                                 const ProgressSinks& sinks);

}  // namespace awqd::model
