// The ring of a consumer, four warps of the fused product: what a slot holds, and who fills it.
// Device code only.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/sm80/qmatmul.h"
#include "kernels/layouts/mma16.h"

namespace awqd::cuda {

// Copies of 16 bytes from global to shared memory that are begun together and end together. From
// sm_80 on the hardware carries them out by itself (cp.async). Before, the data wait in registers,
// so that a consumer multiplies while its next loads are on their way.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr bool kAsyncCopies = false;
#else
inline constexpr bool kAsyncCopies = true;  // for the host too
#endif

// Up to kMost of one thread. Every `at` is known when compiled, or the registers become memory.
template <int kMost, bool kAsync = kAsyncCopies>
class Copies {
 public:
  __device__ __forceinline__ void Start(int, uint32_t shared, const void* global) {
    CopyAsync16(shared, global);
  }
  // Zeros, and nothing is read, where not `valid`.
  __device__ __forceinline__ void StartOrZero(int, uint32_t shared, const void* global,
                                              bool valid) {
    CopyAsync16OrZero(shared, global, valid);
  }
  // Nothing: groups are committed and waited for (ptx.cuh).
  __device__ __forceinline__ void Land() {}
};

template <int kMost>
class Copies<kMost, false> {
 public:
  static_assert(kMost <= 32);

  __device__ __forceinline__ void Start(int at, uint32_t shared, const void* global) {
    StartOrZero(at, shared, global, true);
  }
  __device__ __forceinline__ void StartOrZero(int at, uint32_t shared, const void* global,
                                              bool valid) {
    held_[at] = valid ? *static_cast<const uint4*>(global) : uint4{};
    to_[at] = shared;
    started_ |= 1u << at;
  }
  // Stores what was read since the last call. A barrier then shows it to the others.
  __device__ __forceinline__ void Land() {
#pragma unroll
    for (int at = 0; at < kMost; ++at) {
      if ((started_ >> at & 1) != 0) StoreShared16(to_[at], held_[at]);
    }
    started_ = 0;
  }

 private:
  uint4 held_[kMost];
  uint32_t to_[kMost];
  uint32_t started_ = 0;
};

namespace {

constexpr int kConsumerThreads = 128;

// An element of E4M3 activations.
struct E4m3 {
  uint8_t code;
};

// X: the elements of activations. Sum: what their products are added up in along K.
template <class Record_, MatmulVariant kTile, class X_, class Sum_>
struct QMatmulConfig {
  using Record = Record_;
  using X = X_;
  using Sum = Sum_;
  static constexpr int kTokens = kTile.tokens;
  static constexpr int kRowTiles = kTile.row_tiles;
  static constexpr int kConsumers = kTile.k_ranges;
  static constexpr int kThreads = kConsumers * kConsumerThreads;
  static constexpr int kStages = kAsyncCopies ? kTile.stages : kHeldSlots;
  static constexpr int kBlocks = kTile.blocks;
  static constexpr int kRows = kRowTiles * mma16::kTileN;
  static constexpr int kRowsShift = kRowTiles == 1 ? 6 : 7;
  static_assert(kRows == 1 << kRowsShift);
  static constexpr int kTokenTiles = kTokens / 8;
  // Halves of a record at a time: both, unless their codes would not fit the registers.
  static constexpr int kHalves = kTokens * kRowTiles < 96 ? 2 : 1;
  static constexpr int kTokenBytes = mma16::kBlockK * static_cast<int>(sizeof(X));
  // A slot has a scale for each token beside E4M3.
  static constexpr bool kTokenScales = std::is_same_v<X, E4m3>;
  static constexpr int kScalesBytes = kTokenScales ? 4 * kTokens : 0;
  // Whether the GPUs that this code is compiled for have the shared memory for it.
  static constexpr bool kFits =
      kAsyncCopies ||
      kConsumers * kStages * (kRowTiles * Record::kCodesBytes + kTokens * kTokenBytes) +
              PairTableBytes(Record::kCode) <=
          kTuringSharedBytes;
  // A block that stands alone joins its sums in the rings' memory.
  static constexpr int kReductionBytes = 4 * kTokens * SumStride(kRows);
  static_assert(!kAsyncCopies ||
                kStages * (kRowTiles * Record::kCodesBytes + kTokens * kTokenBytes) >=
                    kReductionBytes);
};

__device__ __forceinline__ int ConsumerThread() { return threadIdx.x % kConsumerThreads; }

// Bytes of one slot of the ring: the records of all row tiles, then the tokens, then their scales.
template <class Config>
struct Slot {
  int record_bytes;

  __device__ __forceinline__ explicit Slot(int metas)
      : record_bytes(Config::Record::kCodesBytes +
                     (Config::Record::kFine ? metas : Config::Record::kMetas) *
                         Config::Record::kMetaBytes) {}
  __device__ __forceinline__ int metas() const {
    return (record_bytes - Config::Record::kCodesBytes) / Config::Record::kMetaBytes;
  }
  // Where they begin.
  __device__ __forceinline__ int tokens() const { return Config::kRowTiles * record_bytes; }
  __device__ __forceinline__ int scales() const {
    return tokens() + Config::kTokens * Config::kTokenBytes;
  }
  __device__ __forceinline__ int bytes() const { return scales() + Config::kScalesBytes; }
  __device__ __forceinline__ int ring_bytes() const {
    const int slots = Config::kStages * bytes();
    return kAsyncCopies ? slots : max(slots, Config::kReductionBytes);
  }
};

// Walks around the ring. Whoever does keeps addresses that move on by addition, because the
// compiler would otherwise compute them anew in every step, which costs more than the decode.
template <class Config>
class Walk {
 public:
  // Bytes from this slot to the next.
  __device__ __forceinline__ int Advance(const Slot<Config>& slot) {
    const bool wrap = ++at_ == Config::kStages;
    if (wrap) at_ = 0;
    return wrap ? (1 - Config::kStages) * slot.bytes() : slot.bytes();
  }

 private:
  int at_ = 0;
};

// Feeds the ring with consecutive 128-row blocks of K.
template <class Config>
class TileLoader {
 public:
  // `first_block` of `tile` (of 64 out features) and `first_token` are where the ring starts.
  __device__ __forceinline__ TileLoader(const QMatmulParams& p, const Slot<Config>& slot,
                                        uint32_t ring, int64_t tile, int64_t first_token,
                                        int64_t first_block)
      : slot_(slot), codes_(ring + ConsumerThread() * 16), x_step_(kTokensPerStep * p.x_stride) {
    const int64_t last = (p.n + mma16::kTileN - 1) / mma16::kTileN - 1;
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      // A row tile past the end repeats the last one; its results are never stored.
      const int64_t record = min(tile + r, last) * p.k_blocks + first_block;
      weights_[r] = p.records + record * slot.record_bytes + ConsumerThread() * 16;
    }
    const int token = ConsumerThread() / kChunks, chunk = ConsumerThread() % kChunks;
    // 16-byte chunks are XOR-ed with the token so that ldmatrix meets no bank twice.
    tokens_ = ring + slot.tokens() + token * Config::kTokenBytes + ((chunk ^ (token & 7)) * 16);
    const int64_t col = first_block * mma16::kBlockK + chunk * kChunk;
    k_left_ = static_cast<int>(p.k - col);
    const int64_t left = p.m - first_token - token;
    tokens_left_ = Keep(static_cast<int>(min(left, int64_t{Config::kTokens})));
    x_ = static_cast<const X*>(p.x);
    if (left > 0) x_ += (first_token + token) * p.x_stride + col;
    if constexpr (Config::kTokenScales) {
      scales_ = ring + slot.scales() + ConsumerThread() * 16;
      token_scales_ =
          p.token_scales + first_block * p.token_scales_stride + first_token + ConsumerThread() * 4;
      token_scales_stride_ = p.token_scales_stride;
    }
  }

  // Starts the copies of the next block into the next slot.
  __device__ __forceinline__ void Load() {
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      const uint32_t to = codes_ + r * slot_.record_bytes;
#pragma unroll
      for (int i = 0; i < kCodesSteps; ++i) {
        const int at = i * kStepBytes;
        if (kCodesBytes - at >= kStepBytes || ConsumerThread() * 16 < kCodesBytes - at) {
          copies_.Start(r * kRecordSteps + i, to + at, weights_[r] + at);
        }
      }
#pragma unroll
      for (int i = 0; i < kMetasSteps; ++i) {
        const int at = kCodesBytes + i * kStepBytes;
        if (i * kConsumerThreads + ConsumerThread() <
            slot_.metas() * (Config::Record::kMetaBytes / 16)) {
          copies_.Start(r * kRecordSteps + kCodesSteps + i, to + at, weights_[r] + at);
        }
      }
      weights_[r] += slot_.record_bytes;
    }
    LoadTokens();
    const int next = walk_.Advance(slot_);
    codes_ += next, tokens_ += next, scales_ += next;
  }

  // Goes on elsewhere: so many records on from the block after the one just loaded, and so many
  // blocks of K. Either may be negative.
  __device__ __forceinline__ void Move(int records, int blocks) {
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      weights_[r] += static_cast<int64_t>(records) * slot_.record_bytes;
    }
    k_left_ -= blocks * mma16::kBlockK;
    x_ += blocks * mma16::kBlockK;
  }

  // Ends the copies that the hardware does not carry out by itself.
  __device__ __forceinline__ void Land() { copies_.Land(); }

  // Brings the first records into L2 without waiting for whoever writes x.
  __device__ __forceinline__ void Prefetch(int blocks) const {
#pragma unroll
    for (int r = 0; r < Config::kRowTiles; ++r) {
      const uint8_t* from = weights_[r] - ConsumerThread() * 16;
      for (int at = ConsumerThread() * 128; at < blocks * slot_.record_bytes;
           at += kConsumerThreads * 128) {
        PrefetchL2(from + at);
      }
    }
  }

 private:
  static constexpr int kCodesBytes = Config::Record::kCodesBytes;
  using X = typename Config::X;
  static constexpr int kChunk = 16 / sizeof(X);  // elements
  static constexpr int kChunks = mma16::kBlockK / kChunk;
  static constexpr int kTokensPerStep = kConsumerThreads / kChunks;
  static constexpr int kTokenSteps = (Config::kTokens + kTokensPerStep - 1) / kTokensPerStep;
  // Copies of a thread: of the codes of a record, of all of a record, of a slot.
  static constexpr int kStepBytes = kConsumerThreads * 16;
  static constexpr int kCodesSteps = (kCodesBytes + kStepBytes - 1) / kStepBytes;
  static constexpr int kMetasSteps = std::max(
      1, (Config::Record::kMetas * Config::Record::kMetaBytes + kStepBytes - 1) / kStepBytes);
  static constexpr int kRecordSteps = kCodesSteps + kMetasSteps;
  static constexpr int kXSteps = Config::kRowTiles * kRecordSteps + kTokenSteps;
  static constexpr int kSlotSteps = kXSteps + (Config::kTokenScales ? 1 : 0);

  // Activations as [token][128]; zeros past m and k.
  __device__ __forceinline__ void LoadTokens() {
#pragma unroll
    for (int s = 0; s < kTokenSteps; ++s) {
      const int left = Config::kTokens - s * kTokensPerStep;
      if (left < kTokensPerStep && ConsumerThread() >= left * kChunks) break;
      const bool valid = k_left_ > 0 && tokens_left_ > s * kTokensPerStep;
      // Where there is nothing to read the address may be anything.
      copies_.StartOrZero(Config::kRowTiles * kRecordSteps + s,
                          tokens_ + s * kTokensPerStep * Config::kTokenBytes, x_ + s * x_step_,
                          valid);
    }
    k_left_ -= mma16::kBlockK;
    x_ += mma16::kBlockK;
    if constexpr (Config::kTokenScales) {
      // Those past m are there (Float8ScalesBytes).
      if (ConsumerThread() < Config::kTokens / 4) copies_.Start(kXSteps, scales_, token_scales_);
      token_scales_ += token_scales_stride_;
    }
  }

  const Slot<Config> slot_;
  Walk<Config> walk_;
  Copies<kSlotSteps> copies_;
  uint32_t codes_;       // where this thread's share of the next records goes
  uint32_t tokens_;      // and of their tokens
  uint32_t scales_ = 0;  // and of the scales of those
  const float* token_scales_;
  int64_t token_scales_stride_;
  int k_left_;
  int tokens_left_;
  const X* x_;
  const int64_t x_step_;
  const uint8_t* weights_[Config::kRowTiles];
};

}  // namespace
}  // namespace awqd::cuda
