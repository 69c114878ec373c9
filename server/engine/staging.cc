// Shelves of buffers by size class: four classes to each power of two, so that at most a quarter of
// a buffer is slack.
#include "server/engine/staging.h"

#include <algorithm>
#include <bit>
#include <deque>

#include "kernels/base/status.h"

namespace awqd::engine {
namespace {

constexpr int64_t kSmallest = 4096;
constexpr int kStepsPerDoubling = 4;
constexpr int kClasses = 40 * kStepsPerDoubling;

int64_t ClassBytes(int index) {
  const int64_t base = kSmallest << (index / kStepsPerDoubling);
  return base + base / kStepsPerDoubling * (index % kStepsPerDoubling);
}

// The smallest class of at least `bytes`, or kClasses when there is none.
int FindSizeClass(int64_t bytes) {
  if (bytes <= kSmallest) return 0;
  const auto doublings = static_cast<int>(std::bit_width(static_cast<uint64_t>(bytes)) -
                                          std::bit_width(static_cast<uint64_t>(kSmallest)));
  int index = std::min(doublings * kStepsPerDoubling, kClasses);
  while (index < kClasses && ClassBytes(index) < bytes) ++index;
  return index;
}

}  // namespace

// Invariants between calls: kept_bytes_ is the sum over all shelves and at most max_kept_bytes_;
// within a shelf the buffer that was returned last is at the back.
class StagingPool::Shelves {
 public:
  explicit Shelves(int64_t max_kept_bytes) : max_kept_bytes_(max_kept_bytes) {}

  // A kept buffer of that class or up to twice as large, or an empty one (a miss).
  Buffer AcquireBuffer(int index) {
    MutexLock lock(&mu_);
    const int end = std::min(index + kStepsPerDoubling + 1, kClasses);
    for (int i = index; i < end; ++i) {
      if (shelves_[i].empty()) continue;
      Buffer buffer = std::move(shelves_[i].back().buffer);
      shelves_[i].pop_back();
      kept_bytes_ -= buffer.size();
      lent_bytes_ += buffer.size();
      return buffer;
    }
    misses_ += 1;
    return Buffer();
  }

  void NoteLent(int64_t bytes) {
    MutexLock lock(&mu_);
    lent_bytes_ += bytes;
  }

  void Return(Buffer buffer) {
    std::vector<Buffer> freed;  // destroyed after the lock: giving pinned memory back is slow
    MutexLock lock(&mu_);
    lent_bytes_ -= buffer.size();
    if (closed_ || buffer.size() > max_kept_bytes_) {
      freed.push_back(std::move(buffer));
    } else {
      while (kept_bytes_ + buffer.size() > max_kept_bytes_) freed.push_back(TakeOldest());
      kept_bytes_ += buffer.size();
      const int index = FindSizeClass(buffer.size());
      shelves_[index].push_back({std::move(buffer), ++returns_});
    }
  }

  void FreeKept(int64_t rest_bytes) {
    std::vector<Buffer> freed;  // destroyed after the lock, as in Return
    MutexLock lock(&mu_);
    for (int i = kClasses - 1; i >= 0; --i) {
      while (kept_bytes_ > rest_bytes && !shelves_[i].empty()) {
        kept_bytes_ -= shelves_[i].front().buffer.size();
        freed.push_back(std::move(shelves_[i].front().buffer));
        shelves_[i].pop_front();
      }
    }
  }

  // Frees what is kept; from now on returned buffers are freed at once.
  void Close() {
    {
      MutexLock lock(&mu_);
      closed_ = true;
    }
    FreeKept(0);
  }

  StagingStats stats() const {
    MutexLock lock(&mu_);
    return {.misses = misses_, .lent_bytes = lent_bytes_, .kept_bytes = kept_bytes_};
  }

 private:
  struct Kept {
    Buffer buffer;
    int64_t returned;  // order of returns, over all shelves
  };

  Buffer TakeOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::deque<Kept>* oldest = nullptr;
    for (auto& shelf : shelves_) {
      if (shelf.empty()) continue;
      if (oldest == nullptr || shelf.front().returned < oldest->front().returned) oldest = &shelf;
    }
    Buffer buffer = std::move(oldest->front().buffer);
    oldest->pop_front();
    kept_bytes_ -= buffer.size();
    return buffer;
  }

  const int64_t max_kept_bytes_;
  mutable Mutex mu_;
  std::array<std::deque<Kept>, kClasses> shelves_ ABSL_GUARDED_BY(mu_);
  int64_t kept_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t lent_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t misses_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t returns_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

// A buffer that is out; owned by the payloads that point into it.
struct StagingPool::Lent {
  Lent(Buffer lent, std::shared_ptr<Shelves> home)
      : buffer(std::move(lent)), shelves(std::move(home)) {}
  ~Lent() { shelves->Return(std::move(buffer)); }

  Buffer buffer;
  const std::shared_ptr<Shelves> shelves;
};

StagingPool::StagingPool(Device* device, int64_t max_kept_bytes)
    : device_(device), shelves_(std::make_shared<Shelves>(max_kept_bytes)) {}

StagingPool::~StagingPool() { shelves_->Close(); }

absl::StatusOr<Payload> StagingPool::Get(int64_t bytes) {
  const int index = FindSizeClass(bytes);
  if (index == kClasses) {
    return absl::ResourceExhaustedError("host memory: asked for more bytes than there can be");
  }
  Buffer buffer = shelves_->AcquireBuffer(index);
  if (!buffer) {
    AWQD_ASSIGN_OR_RETURN(buffer, device_->Allocate(MemoryKind::kStaging, ClassBytes(index)));
    shelves_->NoteLent(buffer.size());
  }
  char* const data = static_cast<char*>(buffer.data());
  return Payload(std::make_shared<Lent>(std::move(buffer), shelves_), data, bytes);
}

void StagingPool::FreeKept(int64_t rest_bytes) { shelves_->FreeKept(rest_bytes); }

StagingStats StagingPool::stats() const {
  StagingStats stats = shelves_->stats();
  stats.copied_bytes = copied_bytes_.load(std::memory_order_relaxed);
  return stats;
}

}  // namespace awqd::engine
