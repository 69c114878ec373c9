// ModelStatistics: what has run on the weights of a model, counted as it happens.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <vector>

namespace awqd::model {

// Times of batches, in nanoseconds.
struct BatchTimes {
  int64_t input_ns = 0;    // payloads to where kernels read them
  int64_t compute_ns = 0;  // kernels, and results to where answers are made of them
  int64_t output_ns = 0;   // answers, until gRPC has them
};

// Batches of about one size.
struct BatchSizeStatistics {
  int64_t tokens = 0;
  int64_t batches = 0, answered = 0;  // computed; those of them that output_ns has
  BatchTimes times;                   // of all of them
};

// Batches by their tokens: up to 64 each number by itself, above that those up to each power of
// two, so that memory is bounded. Thread-safe.
class BatchSizes {
 public:
  void AddComputed(int64_t tokens, int64_t input_ns, int64_t compute_ns) {
    Counts& counts = sizes_[IndexOf(tokens)];
    counts.batches.fetch_add(1, std::memory_order_relaxed);
    counts.input_ns.fetch_add(input_ns, std::memory_order_relaxed);
    counts.compute_ns.fetch_add(compute_ns, std::memory_order_relaxed);
  }
  void AddAnswered(int64_t tokens, int64_t output_ns) {
    Counts& counts = sizes_[IndexOf(tokens)];
    counts.answered.fetch_add(1, std::memory_order_relaxed);
    counts.output_ns.fetch_add(output_ns, std::memory_order_relaxed);
  }
  // Sizes of which there were batches, rising.
  std::vector<BatchSizeStatistics> Seen() const {
    std::vector<BatchSizeStatistics> out;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const Counts& counts = sizes_[i];
      if (counts.batches == 0) continue;
      out.push_back({TokensOf(i),
                     counts.batches,
                     counts.answered,
                     {counts.input_ns, counts.compute_ns, counts.output_ns}});
    }
    return out;
  }

 private:
  static constexpr int64_t kExact = 64;
  struct Counts {
    std::atomic<int64_t> batches{0}, answered{0}, input_ns{0}, compute_ns{0}, output_ns{0};
  };

  static size_t IndexOf(int64_t tokens) {
    if (tokens <= kExact) return static_cast<size_t>(std::max<int64_t>(0, tokens));
    const int doublings = std::bit_width(static_cast<uint64_t>(tokens - 1)) - 6;  // 65..128: 1
    return std::min<size_t>(kExact + doublings, kSizes - 1);
  }
  static int64_t TokensOf(size_t index) {
    const auto i = static_cast<int64_t>(index);
    return i <= kExact ? i : kExact << (i - kExact);
  }
  // The last one holds what is over 2^31 tokens as well, which no batch comes near.
  static constexpr size_t kSizes = kExact + 1 + 26;

  std::array<Counts, kSizes> sizes_;
};

// Counts over all versions of the model. Thread-safe.
struct ModelStatistics {
  // Counts of works. A work that is partitioned among devices counts once.
  std::atomic<int64_t> requests{0};  // that were computed
  std::atomic<int64_t> failed{0};    // while they were computed
  std::atomic<int64_t> tokens{0};
  std::atomic<int64_t> queue_ns{0};
  // Sums over computed batches; a batch counts once for each of its requests.
  std::atomic<int64_t> input_ns{0}, compute_ns{0};
  std::atomic<int64_t> answered{0}, output_ns{0};  // counted when the last answer was given
  std::atomic<int64_t> batches{0};
  BatchSizes sizes;
  // Requests that reached the engine, and their time from the first parsed byte to the answer.
  std::atomic<int64_t> succeeded{0}, succeeded_ns{0};
  std::atomic<int64_t> refused{0}, refused_ns{0};  // or withdrawn, or failed
  // The same requests, counted when their answers were sent.
  std::atomic<int64_t> in_time{0};  // the client was there to read a result
  std::atomic<int64_t> lost{0};     // computed, but the client was gone, or its deadline passed
  std::atomic<int64_t> not_computed{0};  // refused, expired, withdrawn, or failed
};

}  // namespace awqd::model
