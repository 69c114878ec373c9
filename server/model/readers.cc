// Threads that take the next number from a counter.
#include "server/model/readers.h"

#include <atomic>
#include <exception>
#include <utility>

#include "kernels/base/mutex.h"
#include "kernels/base/parallel_for.h"
#include "server/model/load_memory.h"

namespace awqd::model {
namespace {

// The failure of the least number.
class FirstFailure {
 public:
  explicit FirstFailure(int64_t count) : at_(count) {}

  void Record(int64_t at, absl::Status status, std::exception_ptr thrown) {
    MutexLock lock(&mu_);
    if (at >= at_) return;
    at_ = at;
    status_ = std::move(status);
    thrown_ = std::move(thrown);
  }
  absl::Status ReturnOrThrow() {
    if (thrown_ != nullptr) std::rethrow_exception(thrown_);
    return std::move(status_);
  }

 private:
  Mutex mu_;
  int64_t at_;
  absl::Status status_;
  std::exception_ptr thrown_;
};

}  // namespace

absl::Status RunOnReaders(int readers, int64_t count,
                          absl::FunctionRef<absl::Status(int reader, int64_t i)> work) {
  std::atomic<int64_t> next{0};
  FirstFailure failure(count);
  ParallelFor(readers, [&](size_t thread) {
    const auto reader = static_cast<int>(thread);
    const LoadMemory memory;
    for (int64_t i = next++; i < count; i = next++) {
      absl::Status status;
      std::exception_ptr thrown;
      try {
        status = work(reader, i);
      } catch (const std::exception&) {
        thrown = std::current_exception();
      }
      if (status.ok() && thrown == nullptr) continue;
      next = count;
      failure.Record(i, std::move(status), std::move(thrown));
    }
  });
  return failure.ReturnOrThrow();
}

}  // namespace awqd::model
