// A consumer: a warpgroup that decodes one record a step into the tensor cores' operand, multiplies
// and accumulates. Device code only.
#pragma once

#include "kernels/cuda/common/mma16.cuh"
#include "kernels/cuda/sm90a/persistent.cuh"
#include "kernels/cuda/sm90a/wgmma.cuh"

namespace awqd::cuda {
namespace {

// Four fragments of 16 rows x 16 k, as one lane of a warp holds them.
using Operand = uint32_t[4][4];

// The scales and zero points that decode 64 of K: one of each for a row, or four where groups are
// shorter than 64.
template <class Config>
struct HalfMeta {
  using Math = typename Config::Math;
  static constexpr int kSplits = Config::Record::kFine ? 4 : 1;
  LaneMeta<typename Config::Record> bits[kSplits];
  typename Math::Meta meta;  // of those bits that are in use

  __device__ __forceinline__ void Expand(int split) { meta = Math::Expand(bits[split]); }
};

// Where a thread of a consumer reads in the current slot. The addresses are advanced by addition;
// left to itself, the compiler computes them anew in every step.
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
    using Record = typename Config::Record;
    codes = at + row_tile * 2 * Record::kUnitBytes + LaneCodes<Record::kBits>::LaneOffset(lane);
    scales = ScalesAddress<Record>(at + Record::kCodesBytes, row_tile, lane);
    zeros = ZerosAddress<Record::kBits>(at + Record::kCodesBytes, row_tile, lane);
    tokens = TokensDescriptor(ring.Tokens(slice));
    full = ring.Full(slice);
  }

  // Goes on to the slice's next slot. `record_bytes`: bytes of all records of a slot. `last`: the
  // barrier `full` of the slice's last slot.
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

// Each warp arrives at the barrier `empty` of a slot that it has read, in all of the `blocks` that
// write into the slot. `full`: the slot's other barrier.
template <class Config>
__device__ __forceinline__ void ReleaseSlot(uint32_t full, uint32_t blocks) {
  __syncwarp();
  const uint32_t lane = threadIdx.x % 32, empty = full + 8;
  if (lane < blocks) {
    Config::kCluster == 1 ? BarrierArrive(empty) : BarrierArrive(empty, lane);
  }
}

// The consumer of activations of 16 bits. Other types have consumers of their own.
template <class Config, DType kX = Config::kActivations>
class Consumer {
 public:
  // `record`: which of the block's records this consumer decodes.
  __device__ __forceinline__ Consumer(const PersistentParams& p, const Ring<Config>& ring,
                                      int record, int slice = 0)
      : metas_(Metas<Config>(p)),
        zero_first_(p.zero_first),
        factor_(FactorOf(p)),
        record_bytes_(Config::kRecords * ring.record_bytes),
        last_(ring.Full(Config::kSlots - Config::kSlices + slice)),
        at_(ring, record, slice) {
    if constexpr (Record::kBare) meta_.meta = Math::Expand(BareMeta(p.zero));
  }

  // Waits for the next step to be in the ring and reads its first codes. Call it before Run.
  __device__ __forceinline__ void Enter() {
    BarrierWait(at_.full, at_.parity);
    Read<0>();
  }

  // Over steps [begin, end) of a work unit, at least one: sums = W^T x, or with `add` sums += W^T
  // x. The ring holds the work unit's steps up to work_end; if more follow, the next one is
  // entered. While the tensor cores work on one half of a step, the next half is read and decoded.
  __device__ __forceinline__ void Run(int begin, int end, int work_end, int add,
                                      Sums<Config>& sums) {
    if constexpr (Config::kScalesSums) {
      static_assert(!Config::kFixedOrder);
      StepsOfGroups(end - begin, add, sums);
      return;
    } else if constexpr (kInHalves) {
      StepsInHalves(end - begin, add, sums);
    } else {
      Steps(end - begin, add, sums);
    }
    if (end < work_end) Enter();
    WgmmaWait<0>();
    ReleaseSlot<Config>(before_, Config::kCluster);
  }

 private:
  using Math = typename Config::Math;
  using Record = typename Config::Record;
  // Bare records have nothing to expand: all have the meta that the consumer began with.
  static constexpr bool kExpands = !Record::kFine && !Record::kBare;

  // A wgmma blocks its warp until the tensor cores take it, and the instructions after it wait too.
  // So codes are read before the wgmma, and operands are decoded in twos instead of fours: the warp
  // decodes two while the tensor cores multiply two. This costs one more wait for each half, and
  // registers, of which three consumers have too few for two sets of sums or for BF16. From 136
  // tokens on a wgmma takes longer than decoding, so only the cost is left. H100, 2026-11-23, in
  // twos: 88 to 128 tokens take 2 to 4 % less time, 256 to 4096 tokens the same, 32 1 to 3 % more.
  static constexpr bool kHasRegisters =
      Config::kRecords < 3 || (Config::kAccumulators == 1 && !Math::kBf16);
  static constexpr bool kWaits = Config::kTokens >= 80 && Config::kTokens <= 128;
  static constexpr int kAtATime = kWaits && kHasRegisters && !Config::kScalesSums ? 2 : 4;

  // After kAtATime products of one half, decodes as many operands of the next half.
  __device__ __forceinline__ void Steps(int left, int add, Sums<Config>& sums) {
    // Before the first step there is no slot to release.
    uint32_t releases = 0;
    if (kExpands) meta_.Expand(0);
    Decode(0, 4, operands_[0]);
    for (;;) {
      Read<1>();
#pragma unroll
      for (int s = 0; s < 4; s += kAtATime) {
        Multiply<0>(s, s == 0 ? add : 1, at_.tokens, sums);
        WgmmaWait<4 / kAtATime>();
        // By now every wgmma that reads the slot before has completed.
        if (s + kAtATime == 4) ReleaseSlot<Config>(before_, releases);
        if (s == 0 && Record::kMetas == 2) meta_.Expand(0);
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
      if (kExpands) meta_.Expand(0);
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

  // The same in another order, for pairs of blocks with few tokens: with the order above they take
  // 2 to 3 % longer, with BF16 5 %, though the compiled loops differ by a few instructions only.
  static constexpr bool kInHalves = Config::kCluster == 2 && Config::kTokens <= 48;

  __device__ __forceinline__ void StepsInHalves(int left, int add, Sums<Config>& sums) {
    static_assert(kAtATime == 4);
    uint32_t releases = 0;
    for (;;) {
      if (kExpands) meta_.Expand(0);
      Decode(0, 4, operands_[0]);
      Multiply<0>(0, add, at_.tokens, sums);
      Read<1>();
      WgmmaWait<1>();
      ReleaseSlot<Config>(before_, releases);
      if (Record::kMetas == 2) meta_.Expand(0);
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

  // The same where scales multiply sums. A step lies in one group, so its products are summed from
  // zero, and sums += their sum times the scale. Waits for all of it; the next step is entered only
  // by the caller.
  __device__ __forceinline__ void StepsOfGroups(int left, int add, Sums<Config>& sums) {
    static_assert(kAtATime == 4);
    if (!add) {
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) sums[i] = 0;
    }
    Sums<Config> group;
    meta_.Expand(0);
    Decode(0, 4, operands_[0]);
    for (;;) {
      Read<1>();
      Multiply<0>(0, 0, at_.tokens, group);
      Decode(0, 4, operands_[1]);
      const float scales[2] = {meta_.meta.scales[0], meta_.meta.scales[1]};
      Multiply<1>(0, 1, at_.tokens, group);
      before_ = at_.full;
      at_.Advance(record_bytes_, last_);
      const bool last = --left == 0;
      if (!last) {
        Enter();
        meta_.Expand(0);
        WgmmaWait<1>();
        Decode(0, 4, operands_[0]);
      }
      WgmmaWait<0>();
      ReleaseSlot<Config>(before_, Config::kCluster);
#pragma unroll
      for (int i = 0; i < Config::kSums; ++i) sums[i] += scales[i / 2 % 2] * group[i];
      if (last) return;
    }
  }

  // Reads the codes of half a step, and its scales and zero points unless the second half has the
  // same as the first.
  template <int kHalf>
  __device__ __forceinline__ void Read() {
    codes_.Load(at_.codes + kHalf * Record::kUnitBytes);
    if constexpr (!Record::kBare && (kHalf == 0 || Record::kMetas > 1)) {
#pragma unroll
      for (int s = 0; s < HalfMeta<Config>::kSplits; ++s) {
        const int which = Record::kFine ? (kHalf * 4 + s) * metas_ / 8 : kHalf;
        const int offset = which * Record::kMetaBytes;
        meta_.bits[s] =
            LoadMeta<Record>(at_.scales + offset, at_.zeros + offset, zero_first_, factor_);
      }
    }
  }

  // FP32 scales are multiplied by this.
  static __device__ __forceinline__ float FactorOf(const PersistentParams& p) {
    if constexpr (requires { Math::Factor(p.table); }) return Math::Factor(p.table);
    return 1;
  }

  __device__ __forceinline__ void Decode(int first, int count, Operand& out) {
#pragma unroll
    for (int s = first; s < first + count; ++s) {
      if (Record::kFine) meta_.Expand(s);
      const Pairs pairs = Math::Decode(codes_, s, meta_.meta);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[s][i] = pairs.v[i];
    }
  }

  // Multiplies kAtATime operands of a half. `descriptor`: the lower word of that of the step's
  // tokens.
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

  const int metas_;  // of each record
  const bool zero_first_;
  const float factor_;
  const int record_bytes_;  // of all records of a slot
  const uint32_t last_;     // `full` of the slice's last slot
  Place<Config> at_;
  uint32_t before_ = 0;  // `full` of the slot before
  LaneCodes<Record::kBits> codes_;
  HalfMeta<Config> meta_;
  Operand operands_[2];  // one for each half of a step
};

}  // namespace
}  // namespace awqd::cuda
