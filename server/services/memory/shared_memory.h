// SharedMemory: tensors that clients of this machine leave in POSIX shared memory instead of
// sending.
//
// Every name and number here comes from a client, so the rules are:
//   - Off unless the operator states prefixes, and only names that begin with one: one component of
//     plain characters, which cannot leave the directory. Names of tensors are allowed as well,
//     because perf_analyzer calls its objects "y" and "x_0_0".
//   - Nothing is registered. A request names its object; the server opens it then, and closes it
//     with the request.
//     The open descriptor is the reference count: the client may unlink or replace the
//     object while the request runs, and a killed client leaves nothing behind in the server.
//   - Never mapped. Touching a mapping of a file that its owner truncates is a SIGBUS, and neither
//     checking the size first nor a lock prevents that (seals would, but objects of shm_open cannot
//     be sealed). pread and pwrite return short instead. It costs one copy in each direction, into
//     and out of memory that the device reads and writes at full speed anyway.
//   - Opened so that nothing of the client's choosing can block or redirect it: no symbolic link,
//     no FIFO or device, no lease to wait for, no hard link to an object that another name guards.
//   - An error says what is wrong with an object that the server may open: its caller could find
//     that out by naming ranges of it. An object that is absent and one that the server may not open
//     have the same error, so that nobody learns which objects of others exist.
//   - Bounded: ranges that are open together here, their bytes by Env::in_flight.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "awqd/v1/tensor.pb.h"
#include "kernels/base/unique_fd.h"
#include "kernels/checkpoint/file.h"
#include "server/engine/staging.h"
#include "server/services/memory/device_region.h"
#include "server/services/task_queue.h"

namespace awqd::services {

struct SharedMemoryOptions {
  std::vector<std::string> prefixes;  // none of them empty; none: off
  int64_t max_open = 256;             // ranges
  bool cuda = false;                  // memory of GPUs too
};

// INVALID_ARGUMENT unless 1 to 64 letters, digits, '.', '_' and '-', not starting with '.'.
absl::Status CheckSharedMemoryPrefix(absl::string_view prefix);

// A range of memory that a client and the server share: of an open object, of a ring, or of a GPU.
// A further kind of memory is a further kind of range. Move-only; closes an object when destroyed.
class SharedRange {
 public:
  SharedRange() = default;
  // Bytes that stay mapped, whatever their client does, as long as `owner` lives.
  SharedRange(std::shared_ptr<const void> owner, char* data, int64_t size)
      : mapped_(std::move(owner), data, size), size_(size) {}
  // A range within memory of a GPU. `field`: where the request has it.
  SharedRange(std::shared_ptr<const DeviceRegion> region, int64_t offset, int64_t size,
              absl::string_view field)
      : mapped_(region->Slice(offset, size)),
        region_(std::move(region)),
        size_(size),
        field_(field) {}

  explicit operator bool() const { return fd_.ok() || mapped() || on_device(); }
  bool mapped() const { return !on_device() && mapped_.data() != nullptr; }
  bool on_device() const { return region_ != nullptr; }
  int64_t size() const { return size_; }
  // A GPU's memory itself, for works that access it, and its events.
  const engine::Payload& device_memory() const { return mapped_; }
  const std::shared_ptr<const DeviceRegion>& region() const { return region_; }
  // For a step of a chain: the points before and behind it.
  void SetPoints(std::shared_ptr<StreamPoint> waits_for, std::shared_ptr<StreamPoint> marks) {
    waits_for_ = std::move(waits_for);
    marks_ = std::move(marks);
  }
  const std::shared_ptr<StreamPoint>& waits_for() const { return waits_for_; }
  const std::shared_ptr<StreamPoint>& marks() const { return marks_; }

  // Reads the whole range. INVALID_ARGUMENT when the object has become shorter.
  absl::Status Read(char* out) const;
  // Writes from the beginning of the range, at most size() bytes. RESOURCE_EXHAUSTED when the
  // system has no memory for them, INVALID_ARGUMENT when the object does not take them. An object that has become shorter grows again, within the bounds that it
  // once had.
  absl::Status Write(absl::string_view bytes) const;

 private:
  friend class SharedMemory;
  // One of the ranges that may be open.
  struct Leave {
    void operator()(std::atomic<int64_t>* open) const { open->fetch_sub(1); }
  };
  using Slot = std::unique_ptr<std::atomic<int64_t>, Leave>;

  absl::Status Refuse(absl::string_view reason) const;

  Slot slot_;
  UniqueFd fd_;
  engine::Payload mapped_;
  std::shared_ptr<const DeviceRegion> region_;
  std::shared_ptr<StreamPoint> waits_for_, marks_;
  int64_t offset_ = 0;
  int64_t size_ = 0;
  std::string field_;
};

// Thread-safe. Outlives its ranges.
class SharedMemory {
 public:
  enum class Access { kRead, kWrite };

  // Each of `options.prefixes` passed the check above. FAILED_PRECONDITION when there is no shared memory.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create(const SharedMemoryOptions& options);

  // `field` is where the request has the range; errors begin with it. UNIMPLEMENTED when switched
  // off, RESOURCE_EXHAUSTED when too many are open, INVALID_ARGUMENT for all else. Never blocks.
  absl::StatusOr<SharedRange> Open(const v1::SharedMemory& range, Access access,
                                   absl::string_view field);

  // Writes `result` and calls `done` once: on a thread of its own when that takes long, so that a
  // device does not wait for it, else before this returns. After Stop only the latter.
  void Write(SharedRange range, engine::Payload result,
             std::function<void(const absl::Status&)> done);

  // Returns when every `done` was called.
  void Stop() { writers_.Stop(); }

  // The object that has this name now: its file system and inode. Null when there is none.
  using ObjectId = std::pair<dev_t, ino_t>;
  std::optional<ObjectId> Identify(const std::string& name) const;

  bool on() const { return !options_.prefixes.empty(); }
  // For clients that make objects; empty when it is off.
  std::string prefix() const { return on() ? options_.prefixes.front() : ""; }
  int64_t open_ranges() const { return open_.load(); }

 private:
  SharedMemory(SharedMemoryOptions options, UniqueFd directory);
  absl::Status CheckRange(const v1::SharedMemory& range, absl::string_view field) const;

  const SharedMemoryOptions options_;
  const UniqueFd directory_;
  std::atomic<int64_t> open_{0};
  TaskQueue writers_;
};

}  // namespace awqd::services
