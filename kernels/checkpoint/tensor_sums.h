// TensorSums: checksums of tensors as they were first read, compared when a load ends: a store
// through a shared mapping changes a file and none of its times.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/mutex.h"
#include "kernels/checkpoint/tensor_file.h"

namespace awqd::model {

// Sums have a random seed. Read is thread-safe.
class TensorSums {
 public:
  TensorSums();

  // TensorFile::Read, and the sum of what it read. File and tensor outlive this.
  absl::Status Read(const TensorFile& file, const TensorInfo& tensor, absl::Span<uint8_t> out,
                    const std::atomic<bool>* cancelled = nullptr);

  // Reads all of them again, on several threads. INVALID_ARGUMENT naming the file when the bytes of
  // one are others now, UNAVAILABLE once `cancelled`, INTERNAL on an I/O error.
  absl::Status Check(const std::atomic<bool>& cancelled) const;

 private:
  struct Entry {
    const TensorFile* file;
    const TensorInfo* tensor;
    uint64_t sum;
  };
  absl::Status CheckOne(const Entry& entry, absl::Span<uint8_t> buffer,
                        const std::atomic<bool>* cancelled) const;

  const uint64_t seed_;
  Mutex mu_;
  std::vector<Entry> entries_;  // guarded by mu_ while tensors are read
};

}  // namespace awqd::model
