// MakeCallRecorder: makes the recorder of calls for the options.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/config/options.h"
#include "server/obs/call_recorder.h"

namespace awqd {

// Returns null when calls are neither logged nor traced. INVALID_ARGUMENT when the trace file
// cannot be written. Call it before threads start.
absl::StatusOr<std::unique_ptr<obs::CallRecorder>> MakeCallRecorder(const Options& options);

}  // namespace awqd
