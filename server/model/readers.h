// RunOnReaders: reads the linears of a load, some at a time.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace awqd::model {

// Calls work(reader, i) once for every i in [0, count), begun in ascending order, on up to
// `readers` threads, one of them the calling one. `reader` is the number of the thread, from 0.
// After an error or an exception no call is begun. The error of the least i is returned, or its
// exception thrown.
absl::Status RunOnReaders(int readers, int64_t count,
                          absl::FunctionRef<absl::Status(int reader, int64_t i)> work);

}  // namespace awqd::model
