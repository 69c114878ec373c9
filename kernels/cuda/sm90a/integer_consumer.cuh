// The consumer of INT8 activations: decodes a record a step to signed bytes, multiplies, sums in
// INT32. Where groups along K have scales, sums are scaled and added up in FP32 after every step.
// Device code only.
#pragma once

#include "kernels/cuda/sm90a/consumer.cuh"

namespace awqd::cuda {
namespace {

template <class Config>
class Consumer<Config, DType::kInt8> {
 public:
  // `record`: which of the block's records this consumer decodes.
  __device__ __forceinline__ Consumer(const PersistentParams& p, const Ring<Config>& ring,
                                      int record, int slice = 0)
      : record_bytes_(Config::kRecords * ring.record_bytes),
        last_(ring.Full(Config::kSlots - Config::kSlices + slice)),
        at_(ring, record, slice) {}

  // Waits for the next step to be in the ring and reads its codes. Call it before Run.
  __device__ __forceinline__ void Enter() {
    BarrierWait(at_.full, at_.parity);
    codes_[0].Load(at_.codes);
    codes_[1].Load(at_.codes + Record::kUnitBytes);
    if constexpr (!Record::kBare) {
      meta_ = {LoadShared4(at_.scales), LoadZeros<kBits>(at_.zeros)};
    }
  }

  // Over steps [begin, end) of a work unit, at least one: sums = W^T x, or with `add` sums += W^T
  // x. The ring holds the work unit's steps up to work_end; if more follow, the next one is
  // entered. While the tensor cores work on a step, the next one is read and decoded.
  __device__ __forceinline__ void Run(int begin, int end, int work_end, int add,
                                      Sums<Config>& sums) {
    // Zeros, instead of a first product that ignores the sums, end the life of those before: else
    // the compiler keeps them beside their FP32 copy in the epilogue.
    if (add == 0) Clear<Config>(sums);
    if constexpr (Config::kIntegers) {
      Steps(end - begin, sums, [](const RowScales&) {});
    } else {
      Integers integers;
      Steps(end - begin, integers, [&](const RowScales& scales) {
        WgmmaWait<0>();
        Fold(scales, integers, sums);
      });
    }
    if (end < work_end) Enter();
    WgmmaWait<0>();
    ReleaseSlot<Config>(before_, Config::kCluster);
  }

  // Those of the step that was decoded last.
  __device__ __forceinline__ const RowScales& scales() const { return scales_; }

 private:
  using Record = typename Config::Record;
  using Integers = uint32_t[Config::kSums];
  static constexpr int kBits = Record::kBits;
  static_assert(Record::kMetas <= 1, "one scale serves a record's 128 of K");
  static_assert(Config::kIntegers || Config::kTokens <= 128, "registers hold FP32 sums as well");

  // `fold` is called when a step's products are on their way.
  template <class Fold>
  __device__ __forceinline__ void Steps(int left, Integers& integers, const Fold& fold) {
    uint32_t releases = 0;  // before the first step there is no slot to release
    Decode(operands_[0]);
    while (!Step<0>(left, releases, integers, fold) && !Step<1>(left, releases, integers, fold)) {
    }
  }

  // Multiplies the step that is in operands_[kWhich]; decodes the next one into the others. True:
  // it was the last.
  template <int kWhich, class Fold>
  __device__ __forceinline__ bool Step(int& left, uint32_t& releases, Integers& integers,
                                       const Fold& fold) {
    Multiply(operands_[kWhich], integers);
    WgmmaWait<1>();
    ReleaseSlot<Config>(before_, releases);
    releases = Config::kCluster;
    before_ = at_.full;
    at_.Advance(record_bytes_, last_);
    const RowScales scales = scales_;
    const bool last = --left == 0;
    if (!last) {
      Enter();
      Decode(operands_[1 - kWhich]);
    }
    fold(scales);
    return last;
  }

  __device__ __forceinline__ void Decode(Operand& out) {
    StepBytes below = {};
    if constexpr (!Record::kBare) {
      below = BelowZeros<kBits>(meta_.zeros);
      scales_ = {Fp16ToFloat(meta_.scales & 0xffff), Fp16ToFloat(meta_.scales >> 16)};
    }
#pragma unroll
    for (int s = 0; s < 4; ++s) DecodeSigned<kBits>(codes_[s / 2], s % 2 * 2, below, out[s]);
  }

  // Integers of a step that is folded start at 0.
  __device__ __forceinline__ void Multiply(const Operand& operand, Integers& integers) {
    const uint64_t tokens = WholeDescriptor(at_.tokens);
    WgmmaArrive();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      WgmmaInt8<Config::kTokens>(integers, operand[s], tokens + s * kDescriptorStep,
                                 s > 0 || Config::kIntegers);
    }
    WgmmaCommit();
  }

  // sums += scale * integers.
  __device__ __forceinline__ void Fold(const RowScales& scales, const Integers& integers,
                                       Sums<Config>& sums) const {
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) {
      const float sum = __int2float_rn(static_cast<int>(integers[i]));
      sums[i] = fmaf(sum, i % 4 < 2 ? scales.low : scales.high, sums[i]);
    }
  }

  const int record_bytes_;  // of all records of a slot
  const uint32_t last_;     // `full` of the slice's last slot
  Place<Config> at_;
  uint32_t before_ = 0;  // `full` of the slot before
  LaneCodes<kBits> codes_[2];
  LaneMetaBits meta_ = {};
  RowScales scales_ = {1, 1};
  Operand operands_[2];  // of a step and of the next one
};

}  // namespace
}  // namespace awqd::cuda
