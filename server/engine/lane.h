// Lane: one stream of a device with the buffers that works run in; used by one thread at a time.
//
// It knows no operation. A work copies its data to the device (GatherRows, Upload), keeps the data
// between two steps there (AllocateScratch), enqueues kernels on the stream, and copies its result
// to the host (AllocateResult, Fetch). Steps run in the order in which they are enqueued; only
// Fetch waits. Buffers only grow while there is work, so that after warm-up the request path
// allocates nothing on the device and nothing pinned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "server/batching/task.h"
#include "server/engine/staging.h"
#include "server/engine/threshold_table.h"

namespace awqd::engine {

// Rows of one request within a batch, in staging memory or in that of a device.
struct RowPiece {
  const char* data = nullptr;
  int64_t rows = 0;
  const Device* device = nullptr;  // Payload::device
};

// The rows of all pieces together.
int64_t CountRows(absl::Span<const RowPiece> pieces);

// Calls run(begin, count) for ranges of up to `most` items that cover [0, items), in order, until
// one fails. For a work larger than the buffers of a lane may become.
absl::Status RunInSteps(int64_t items, int64_t most,
                        absl::FunctionRef<absl::Status(int64_t begin, int64_t count)> run);

// A piece of a result, in staging memory.
struct ResultPiece {
  char* data = nullptr;
  int64_t bytes = 0;
};

// Where a part of a batch's result goes instead: memory of a device. The addresses [begin,
// begin + output.size()) stand for it and are not written.
struct DeviceOutput {
  char* begin = nullptr;
  Payload output;
};

struct LaneOptions {
  Device* device = nullptr;
  StagingPool* staging = nullptr;  // copies are counted there
  const ThresholdTable* thresholds = nullptr;
  int64_t max_rows = 0;
};

// Pointers that a lane returns are for kernels on its stream, valid until the next Fetch or
// DiscardWork, and 256-byte aligned. On the CPU kernels read and write some host memory in place,
// with the alignment that it has; on a GPU they write small results there, and read and write
// aligned memory that a caller shares.
// RESOURCE_EXHAUSTED when the device has no room.
class Lane {
 public:
  // The objects that the options point to outlive the lane.
  static absl::StatusOr<std::unique_ptr<Lane>> Create(const LaneOptions& options);

  ~Lane() { DiscardWork(); }

  StreamView stream() const { return stream_->view(); }
  // The thresholds of weights on this device.
  const ThresholdTable& thresholds() const { return *options_.thresholds; }
  // Rows that a work should run at a time, so that buffers stay bounded; a batch of several works
  // never has more.
  int64_t max_rows() const { return options_.max_rows; }

  // Concatenates the pieces' rows, of `row_bytes` each. Called once before a Fetch.
  absl::StatusOr<const void*> GatherRows(absl::Span<const RowPiece> pieces, int64_t row_bytes);
  // Copies host memory that is not staging memory, such as a bias or a list of indices, to the
  // device. The caller may change it when this returns, on the CPU after Fetch.
  absl::StatusOr<const void*> Upload(const void* host, int64_t bytes);
  absl::StatusOr<const float*> Upload(absl::Span<const float> host);
  // Returns buffer number `slot` for data between steps; contents undefined. Each number is a
  // buffer that stays, so numbers are small. A second call with more bytes loses the contents.
  absl::StatusOr<void*> AllocateScratch(size_t slot, int64_t bytes) {
    if (slot >= scratch_.size()) scratch_.resize(slot + 1);
    return GrowBuffer(&scratch_[slot], MemoryKind::kDevice, bytes);
  }
  // Returns the buffer for a kernel's workspace; all steps share it.
  absl::StatusOr<void*> AllocateWorkspace(int64_t bytes) {
    return GrowBuffer(&workspace_, MemoryKind::kDevice, bytes);
  }
  // Before a work: the parts of its result that go to memory of devices. `early`: Fetch does not
  // wait, because nobody needs the result on the host.
  void SetOutputs(std::vector<DeviceOutput> outputs, bool early = false) {
    outputs_ = std::move(outputs);
    early_ = early;
  }
  // Returns the memory for a result that Fetch brings to `host`, staging memory. Kernels write each
  // element once.
  absl::StatusOr<void*> AllocateResult(void* host, int64_t bytes) {
    if (void* const place = FindPlace(host, bytes)) return place;
    return GrowBuffer(&y_device_, MemoryKind::kDevice, bytes);
  }
  // The same for a result of several arrays, a buffer for each.
  using Targets = absl::InlinedVector<void*, 4>;
  absl::StatusOr<Targets> AllocateResults(absl::Span<const ResultPiece> pieces);
  // Copies the result to `host`, or to where its parts go, and waits for the stream, unless the work
  // is early.
  absl::Status Fetch(void* host, const void* target, int64_t bytes);
  absl::Status Fetch(absl::Span<const ResultPiece> pieces, const Targets& targets);
  Device& device() { return *device_; }
  StagingPool& staging() { return *options_.staging; }
  // Returns the time that GatherRows and Upload took since the last call. On a GPU the copies
  // themselves may end later.
  absl::Duration ResetInputTime() { return std::exchange(input_time_, absl::ZeroDuration()); }

  // Keeps what an early batch uses until the stream was waited for.
  void Keep(std::unique_ptr<batching::Task> task) { kept_.push_back(std::move(task)); }
  // Waits for early batches, if there are any: all of them, or, so that neither they nor the GPU's
  // queue grow without bound, where there are many.
  absl::Status Settle(size_t most = 0);
  // An event that nobody uses any more; null where the device makes none.
  std::shared_ptr<SharedEvent> MakeEvent();

  // Waits for the steps that a failed work has left on the stream, so that its memory may be freed.
  void DiscardWork() {
    Synchronize().IgnoreError();  // the work's own error is the one to report
  }
  // Frees buffers in host memory; the next work allocates them again. Buffers of a device stay,
  // because warm-up brought them to their final size.
  void FreeHostBuffers() {
    if (!direct_) return;
    x_staging_.Reset();
    workspace_.Reset();
    scratch_.clear();
  }

 private:
  Lane(const LaneOptions& options, std::unique_ptr<Stream> stream)
      : options_(options),
        device_(options.device),
        direct_(device_->host_addressable()),
        stream_(std::move(stream)) {}

  struct Uploaded {
    Buffer staging, device;
  };

  absl::Status Synchronize();

  // Where kernels write a result of `host` without a copy; null: nowhere. Across the bus a small
  // one takes less time so than a copy that starts behind the kernel: a product with a result of 8
  // KiB takes 15.6 us instead of 21.5, of 64 KiB 15.7 instead of 24.3 (H200, 2026-11-29).
  void* FindPlace(void* host, int64_t bytes) const;
  // Appends the copies that bring a piece of a result from `from` to where it goes.
  absl::Status FetchPiece(const ResultPiece& piece, const char* from,
                          std::vector<CopyPiece>* to_devices);
  // Makes the buffer at least `bytes` long. Waits for the stream before it frees a buffer.
  absl::StatusOr<char*> GrowBuffer(Buffer* buffer, MemoryKind kind, int64_t bytes);
  // For a device that does not address host memory: copies large pieces directly, and runs of small
  // ones of staging memory after they were concatenated.
  absl::Status CopyRows(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target);
  // Copies rows one after the other on the host; returns their end.
  char* Concatenate(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target);

  const LaneOptions options_;
  Device* const device_;
  const bool direct_;  // kernels reach host memory
  const std::unique_ptr<Stream> stream_;
  Buffer x_staging_, x_device_;
  std::vector<Uploaded> uploads_;
  size_t uploads_used_ = 0;  // since the last Fetch
  absl::Duration input_time_;
  std::vector<Buffer> scratch_;
  Buffer workspace_;
  Buffer y_device_;
  std::vector<DeviceOutput> outputs_;
  bool early_ = false;
  bool pending_ = false;  // early work was enqueued since the stream was waited for
  std::vector<std::unique_ptr<batching::Task>> kept_;
  std::vector<std::shared_ptr<SharedEvent>> events_;
};

}  // namespace awqd::engine
