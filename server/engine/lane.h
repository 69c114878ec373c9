// Lane: one stream of a device with the buffers that works run in; used by one thread at a time.
//
// It knows no operation. A work brings its data in (Gather, Upload), keeps what one step leaves for
// the next on the device (Scratch), enqueues kernels on the stream, and takes its result out
// (Target, Fetch). Steps run in the order in which they are enqueued; only Fetch waits. Buffers
// only grow while there is work, so that after warm-up the request path allocates nothing on the
// device and nothing pinned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "server/engine/staging.h"
#include "server/engine/threshold_table.h"

namespace awqd::engine {

// Rows of one request within a batch, in staging memory.
struct RowPiece {
  const char* data = nullptr;
  int64_t rows = 0;
};

// Rows of all pieces.
int64_t Rows(absl::Span<const RowPiece> pieces);

// Some of a result, in staging memory.
struct ResultPiece {
  char* data = nullptr;
  int64_t bytes = 0;
};

struct LaneOptions {
  Device* device = nullptr;
  StagingPool* staging = nullptr;  // copies are counted there
  const ThresholdTable* thresholds = nullptr;
  int64_t max_rows = 0;
};

// Pointers that a lane hands out are for kernels on its stream, 256-byte aligned (on the CPU what
// is read or written in place lies where the host put it), and good until the next Fetch or Settle.
// RESOURCE_EXHAUSTED when the device has no room.
class Lane {
 public:
  // What the options point to outlives the lane.
  static absl::StatusOr<std::unique_ptr<Lane>> Create(const LaneOptions& options);

  StreamView stream() const { return stream_->view(); }
  // What was measured of weights on this device.
  const ThresholdTable& thresholds() const { return *options_.thresholds; }
  // Rows that a work should run at a time, so that buffers stay bounded; a batch of several works
  // never has more.
  int64_t max_rows() const { return options_.max_rows; }

  // The pieces' rows, of `row_bytes` each, one after the other. Once before a Fetch.
  absl::StatusOr<const void*> Gather(absl::Span<const RowPiece> pieces, int64_t row_bytes);
  // Some bytes of host memory that is not staging memory, such as a bias or a list of indices. It
  // may change when this returns, on the CPU after Fetch.
  absl::StatusOr<const void*> Upload(const void* host, int64_t bytes);
  // Buffer number `slot` for what goes from step to step; contents undefined. Small numbers: each
  // is a buffer that stays. Asked for again with more bytes, it loses its contents.
  absl::StatusOr<void*> Scratch(size_t slot, int64_t bytes);
  // A buffer for what a single kernel needs beside its operands; all steps share it.
  absl::StatusOr<void*> Workspace(int64_t bytes);
  // Where kernels write a result that Fetch brings to `host`, staging memory.
  absl::StatusOr<void*> Target(void* host, int64_t bytes);
  // The same for a result of several arrays, in as many places.
  using Targets = absl::InlinedVector<void*, 4>;
  absl::StatusOr<Targets> TargetsOf(absl::Span<const ResultPiece> pieces);
  // Brings the result to `host` and waits for the stream.
  absl::Status Fetch(void* host, const void* target, int64_t bytes);
  absl::Status Fetch(absl::Span<const ResultPiece> pieces, const Targets& targets);
  Device& device() { return *device_; }
  // What Gather and Upload took since it was asked last. On a GPU the copies go on beside.
  absl::Duration TakeInputTime() { return std::exchange(input_time_, absl::ZeroDuration()); }

  // Waits for what a work that failed has left on the stream, so that its memory may go.
  void Settle();
  // Frees buffers in host memory; the next work allocates them again. A device's own stay: warm-up
  // brought them to their final size.
  void FreeHostBuffers();

 private:
  Lane(const LaneOptions& options, std::unique_ptr<Stream> stream);

  struct Uploaded {
    Buffer staging, device;
  };

  // Makes the buffer at least `bytes` long. Waits for the stream before one that may be in use
  // goes.
  absl::StatusOr<char*> Grow(Buffer* buffer, MemoryKind kind, int64_t bytes);
  // Gather for a device out of the host's reach: large pieces are copied there from where they lie,
  // runs of small ones are put together first.
  absl::Status CopyRows(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target);
  // Copies rows one after the other on the host; returns their end.
  char* Concatenate(absl::Span<const RowPiece> pieces, int64_t row_bytes, char* target);

  absl::StatusOr<const void*> GatherRows(absl::Span<const RowPiece> pieces, int64_t row_bytes);

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
};

}  // namespace awqd::engine
