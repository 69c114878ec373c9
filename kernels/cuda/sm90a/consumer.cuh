// A consumer: a warpgroup that decodes one record a step into the tensor cores' operand, multiplies
// and accumulates. Device code only.
#pragma once

#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/sm90a/persistent.cuh"
#include "kernels/cuda/sm90a/wgmma.cuh"

namespace awqd::cuda {
namespace {

// Four fragments of 16 rows x 16 k, as one lane holds them.
using Operand = uint32_t[4][4];

// What 64 of K are decoded with: one scale and zero point of each row, or with short quantisation
// groups four.
template <class Config>
struct HalfMeta {
  using Math = typename Config::Math;
  static constexpr int kParts = Config::kFine ? 4 : 1;
  LaneMetaBits bits[kParts];
  typename Math::Meta meta;  // of the part in use

  __device__ __forceinline__ void Expand(int part) { meta = Math::Expand(bits[part]); }
};

// Where a thread of a consumer finds its share of a slot of the ring: addresses that move on
// by addition, because the compiler would rather compute them anew than keep them.
template <class Config>
struct Place {
  uint32_t codes;
  uint32_t scales;
  uint32_t zeros;
  uint32_t tokens;  // a descriptor's lower word
  uint32_t full;    // the barrier; `empty` follows it
  uint32_t parity = 0;

  __device__ __forceinline__ Place(const Ring<Config>& ring, int record, int slice) {
    const uint32_t lane = threadIdx.x % 32, row_tile = threadIdx.x / 32 % 4;
    const uint32_t at = ring.Record(slice, record);
    codes = at + row_tile * 2 * mma16::kUnitBytes + lane * 16;
    scales = ScalesAddress(at + mma16::kCodesBytes, row_tile, lane);
    zeros = ZerosAddress(at + mma16::kCodesBytes, row_tile, lane);
    tokens = TokensDescriptor(ring.Tokens(slice));
    full = ring.Full(slice);
  }

  // To the slice's next slot. `record_bytes`: of all records of a slot. `last`: `full` of the
  // slice's last slot.
  __device__ __forceinline__ void Advance(int record_bytes, uint32_t last) {
    constexpr int kNext = Config::kSlices, kBack = kNext - Config::kSlots;
    const bool wrap = full == last;
    const int records = (wrap ? kBack : kNext) * record_bytes;
    codes += records, scales += records, zeros += records;
    tokens += (wrap ? kBack : kNext) * (Config::kTokenBytes >> 4);
    full += (wrap ? kBack : kNext) * 16;
    parity ^= wrap;
  }
};

template <class Config>
class Consumer {
 public:
  // `record`: of the block's, which this warpgroup takes.
  __device__ __forceinline__ Consumer(const PersistentParams& p, const Ring<Config>& ring,
                                      int record, int slice = 0)
      : metas_(Metas<Config>(p)),
        record_bytes_(Config::kRecords * ring.record_bytes),
        last_(ring.Full(Config::kSlots - Config::kSlices + slice)),
        at_(ring, record, slice) {}

  // Waits for the first step and reads of it what Run expects to be read.
  __device__ __forceinline__ void Enter() {
    BarrierWait(at_.full, at_.parity);
    Read<0>();
  }

  // sums = W^T x over steps [begin, end) of a piece, at least one, or with `add` sums += it; the
  // ring carries the piece up to piece_end. While the tensor cores work on one half of a step, the
  // next is read and decoded.
  __device__ __forceinline__ void Run(int begin, int end, int piece_end, int add,
                                      Sums<Config>& sums) {
    if constexpr (kInHalves) {
      StepsInHalves(end - begin, add, sums);
    } else {
      Steps(end - begin, add, sums);
    }
    if (end < piece_end) Enter();
    WgmmaWait<0>();
    Release(before_, Config::kCluster);
  }

 private:
  using Math = typename Config::Math;

  // A product waits to be issued until the tensor cores take it, and what follows in its warp waits
  // with it. So codes are read before it and operands are decoded in twos, which costs a wait more
  // for each half, and registers: three consumers have too few for two sums or for decoding to
  // BF16. From 136 tokens on a product takes longer than decoding, and of twos only the wait is
  // left. NOTES.md, 37 and 39, has what each is worth.
  static constexpr bool kHasRegisters =
      Config::kRecords < 3 || (Config::kSets == 1 && !Math::kBf16);
  static constexpr bool kWaits = Config::kTokens >= 80 && Config::kTokens <= 128;
  static constexpr int kAtATime = kWaits && kHasRegisters ? 2 : 4;

  // Decodes kAtATime operands of the next half after as many products of this one.
  __device__ __forceinline__ void Steps(int left, int add, Sums<Config>& sums) {
    // Nobody releases what was before the first step.
    uint32_t releases = 0;
    if (!Config::kFine) meta_.Expand(0);
    Decode(0, 4, operands_[0]);
    for (;;) {
      Read<1>();
#pragma unroll
      for (int s = 0; s < 4; s += kAtATime) {
        Multiply<0>(s, s == 0 ? add : 1, at_.tokens, sums);
        WgmmaWait<4 / kAtATime>();
        // All that read the step before is done.
        if (s + kAtATime == 4) Release(before_, releases);
        if (s == 0 && Config::kMetas == 2) meta_.Expand(0);
        Decode(s, kAtATime, operands_[1]);
      }
      before_ = at_.full;
      const uint32_t tokens = at_.tokens;
      at_.Advance(record_bytes_, last_);
      Multiply<1>(0, 1, tokens, sums);
      if (--left == 0) {
        if (kAtATime < 4) Multiply<1>(kAtATime, 1, tokens, sums);
        return;
      }
      Enter();
      if (!Config::kFine) meta_.Expand(0);
#pragma unroll
      for (int s = 0; s < 4; s += kAtATime) {
        if (s > 0) Multiply<1>(s, 1, tokens, sums);
        WgmmaWait<4 / kAtATime>();
        Decode(s, kAtATime, operands_[0]);
      }
      add = 1;
      releases = Config::kCluster;
    }
  }

  // The same for pairs of blocks with few tokens, half by half: in the order above they take 2 to
  // 3 % longer and with BF16 5 %, though the compiler's loops differ by a handful of instructions.
  static constexpr bool kInHalves = Config::kCluster == 2 && Config::kTokens <= 48;

  __device__ __forceinline__ void StepsInHalves(int left, int add, Sums<Config>& sums) {
    static_assert(kAtATime == 4);
    uint32_t releases = 0;
    for (;;) {
      if (!Config::kFine) meta_.Expand(0);
      Decode(0, 4, operands_[0]);
      Multiply<0>(0, add, at_.tokens, sums);
      Read<1>();
      WgmmaWait<1>();
      Release(before_, releases);
      if (Config::kMetas == 2) meta_.Expand(0);
      Decode(0, 4, operands_[1]);
      Multiply<1>(0, 1, at_.tokens, sums);
      before_ = at_.full;
      at_.Advance(record_bytes_, last_);
      if (--left == 0) return;
      Enter();
      WgmmaWait<1>();
      add = 1;
      releases = Config::kCluster;
    }
  }

  // The codes of 64 of K and, unless the first half's serve the second as well, what decodes them.
  template <int kHalf>
  __device__ __forceinline__ void Read() {
    codes_ = LoadShared16(at_.codes + kHalf * mma16::kUnitBytes);
    if constexpr (kHalf == 0 || Config::kMetas > 1) {
#pragma unroll
      for (int s = 0; s < HalfMeta<Config>::kParts; ++s) {
        const int which = Config::kFine ? (kHalf * 4 + s) * metas_ / 8 : kHalf;
        meta_.bits[s] = {LoadShared4(at_.scales + which * mma16::kMetaBytes),
                         LoadShared1(at_.zeros + which * mma16::kMetaBytes)};
      }
    }
  }

  __device__ __forceinline__ void Decode(int first, int count, Operand& out) {
    const uint32_t words[4] = {codes_.x, codes_.y, codes_.z, codes_.w};
#pragma unroll
    for (int s = first; s < first + count; ++s) {
      if (Config::kFine) meta_.Expand(s);
      const Pairs pairs = Math::Decode(words[s], meta_.meta);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[s][i] = pairs.v[i];
    }
  }

  // By kAtATime operands of a half. `descriptor`: of the step's tokens, its lower word.
  template <int kHalf>
  __device__ __forceinline__ void Multiply(int first, int add, uint32_t descriptor,
                                           Sums<Config>& sums) {
    constexpr uint32_t kHalfStep = Config::kTokens * 128 >> 4;
    const uint64_t tokens = WholeDescriptor(descriptor) + kHalf * kHalfStep;
    WgmmaArrive();
#pragma unroll
    for (int s = first; s < first + kAtATime; ++s) {
      Wgmma<Config::kTokens, Math::kBf16>(sums, operands_[kHalf][s], tokens + s * kDescriptorStep,
                                          s == first ? add : 1);
    }
    WgmmaCommit();
  }

  // Every warp says for itself that it has read a slot, to the `blocks` that write into it.
  __device__ __forceinline__ void Release(uint32_t full, uint32_t blocks) const {
    __syncwarp();
    const uint32_t lane = threadIdx.x % 32, empty = full + 8;
    if (lane < blocks) {
      Config::kCluster == 1 ? BarrierArrive(empty) : BarrierArrive(empty, lane);
    }
  }

  const int metas_;         // per record
  const int record_bytes_;  // of all records of a slot
  const uint32_t last_;     // `full` of the slice's last slot
  Place<Config> at_;
  uint32_t before_ = 0;  // `full` of the slot before
  uint4 codes_;
  HalfMeta<Config> meta_;
  Operand operands_[2];  // of the halves of a step
};

}  // namespace
}  // namespace awqd::cuda
