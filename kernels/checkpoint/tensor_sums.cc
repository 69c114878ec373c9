// Sums by XXH3, of pieces that stay in a cache between reading and summing.
#include "kernels/checkpoint/tensor_sums.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <exception>
#include <new>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"
#include "kernels/base/out_of_memory.h"
#include "kernels/base/status.h"

namespace awqd::model {
namespace {

constexpr int64_t kPieceBytes = 256 << 10;  // half of a second-level cache
constexpr size_t kMaxThreads = 8;

uint64_t RandomSeed() {
  std::random_device random;
  return static_cast<uint64_t>(random()) << 32 | random();
}

// Reads the tensor piece by piece to where `to(at, size)` says, and sums it.
template <typename To>
absl::StatusOr<uint64_t> SumOf(const TensorFile& file, const TensorInfo& tensor, uint64_t seed,
                               const std::atomic<bool>* cancelled, To to) {
  XXH3_state_t state = {};
  XXH3_64bits_reset_withSeed(&state, seed);
  for (int64_t at = 0; at < tensor.bytes(); at += kPieceBytes) {
    AWQD_RETURN_IF_ERROR(CheckCancelled(cancelled));
    const absl::Span<uint8_t> piece = to(at, std::min(kPieceBytes, tensor.bytes() - at));
    AWQD_RETURN_IF_ERROR(file.ReadPiece(tensor, at, piece));
    XXH3_64bits_update(&state, piece.data(), piece.size());
  }
  return XXH3_64bits_digest(&state);
}

}  // namespace

TensorSums::TensorSums() : seed_(RandomSeed()) {}

absl::Status TensorSums::Read(const TensorFile& file, const TensorInfo& tensor,
                              absl::Span<uint8_t> out, const std::atomic<bool>* cancelled) {
  const auto to = [&](int64_t at, int64_t size) { return out.subspan(at, size); };
  AWQD_ASSIGN_OR_RETURN(const uint64_t sum, SumOf(file, tensor, seed_, cancelled, to));
  MutexLock lock(&mu_);
  entries_.push_back({&file, &tensor, sum});
  return absl::OkStatus();
}

absl::Status TensorSums::CheckOne(const Entry& entry, absl::Span<uint8_t> buffer,
                                  const std::atomic<bool>* cancelled) const {
  const auto to = [&](int64_t, int64_t size) { return buffer.first(size); };
  AWQD_ASSIGN_OR_RETURN(const uint64_t sum,
                        SumOf(*entry.file, *entry.tensor, seed_, cancelled, to));
  if (sum == entry.sum) return absl::OkStatus();
  return Invalid(entry.file->file().shown_name(), ": bytes ", entry.tensor->begin, " to ",
                 entry.tensor->end,
                 " of its tensors changed while it was loaded (through a shared mapping?)");
}

absl::Status TensorSums::Check(const std::atomic<bool>& cancelled) const {
  std::atomic<size_t> next{0};
  Mutex mu;
  absl::Status first;  // guarded by mu
  const auto fail = [&](const absl::Status& status) {
    next = entries_.size();
    MutexLock lock(&mu);
    first.Update(status);
  };
  const auto compare = [&] {
    std::vector<uint8_t> buffer(kPieceBytes);
    for (size_t i = next++; i < entries_.size(); i = next++) {
      absl::Status status = CheckCancelled(&cancelled);  // of a tensor without bytes too
      if (status.ok()) status = CheckOne(entries_[i], absl::MakeSpan(buffer), &cancelled);
      if (!status.ok()) return fail(status);
    }
  };
  const auto work = [&] {
    try {
      compare();
    } catch (const std::bad_alloc&) {
      fail(OutOfMemory("host memory ran out while tensors were compared"));
    }
  };
  std::vector<std::thread> threads;
  const size_t count = std::min<size_t>(kMaxThreads, std::thread::hardware_concurrency());
  while (threads.size() + 1 < std::min(count, entries_.size())) {
    try {
      threads.emplace_back(work);
    } catch (const std::exception&) {  // the process may start no more
      break;
    }
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return first;
}

}  // namespace awqd::model
