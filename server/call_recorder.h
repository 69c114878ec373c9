// MakeCallRecorder: the recorder of calls that the options ask for.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/config/options.h"
#include "server/obs/call_recorder.h"

namespace awqd {

// Null when nothing of calls is logged or traced. INVALID_ARGUMENT when the file of traces cannot
// be written. Before threads start.
absl::StatusOr<std::unique_ptr<obs::CallRecorder>> MakeCallRecorder(const Options& options);

}  // namespace awqd
