// The consumer of INT8 activations: decodes a record a step to signed bytes, multiplies, sums in
// INT32. Sums are scaled and added up in FP32 after every step, or once where a column has one
// scale. Device code only.
#pragma once

#include "kernels/cuda/sm90a/consumer.cuh"

namespace awqd::cuda {
namespace {

template <class Config>
class Consumer<Config, true> {
 public:
  // `record`: which of the block's records this consumer decodes.
  __device__ __forceinline__ Consumer(const PersistentParams& p, const Ring<Config>& ring,
                                      int record, int slice = 0)
      : folds_(p.folds),
        record_bytes_(Config::kRecords * ring.record_bytes),
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
    if (add == 0) Clear<Config>(sums);
    Integers integers;
    int left = end - begin, going = 0;
    uint32_t releases = 0;  // before the first step there is no slot to release
    Decode(operands_[0]);
    while (!Step<0>(left, going, releases, integers, sums) &&
           !Step<1>(left, going, releases, integers, sums)) {
    }
    if (end < work_end) Enter();
    WgmmaWait<0>();
    ReleaseSlot<Config>(before_, Config::kCluster);
    if (!folds_) Fold(scales_, integers, sums);
  }

 private:
  using Record = typename Config::Record;
  using Integers = int[Config::kSums];
  static constexpr int kBits = Record::kBits;
  static_assert(Record::kMetas <= 1, "one scale serves a record's 128 of K");
  static_assert(!IntegersFillRegisters(Config::kTokens), "beside them are as many FP32 sums");

  struct Scales {
    float low, high;  // of a lane's two rows
  };

  // Multiplies the step that is in operands_[kWhich]; decodes the next one into the others. True:
  // it was the last.
  template <int kWhich>
  __device__ __forceinline__ bool Step(int& left, int& going, uint32_t& releases,
                                       Integers& integers, Sums<Config>& sums) {
    Multiply(operands_[kWhich], going, integers);
    WgmmaWait<1>();
    ReleaseSlot<Config>(before_, releases);
    releases = Config::kCluster;
    before_ = at_.full;
    at_.Advance(record_bytes_, last_);
    const Scales scales = scales_;
    const bool last = --left == 0;
    if (!last) {
      Enter();
      Decode(operands_[1 - kWhich]);
    }
    going = !folds_;
    if (folds_) {
      WgmmaWait<0>();
      Fold(scales, integers, sums);
    }
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

  // `going`: 0 starts the sums at 0.
  __device__ __forceinline__ void Multiply(const Operand& operand, int going, Integers& integers) {
    const uint64_t tokens = WholeDescriptor(at_.tokens);
    WgmmaArrive();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      WgmmaInt8<Config::kTokens>(integers, operand[s], tokens + s * kDescriptorStep,
                                 s == 0 ? going : 1);
    }
    WgmmaCommit();
  }

  // sums += scale * integers.
  __device__ __forceinline__ void Fold(const Scales& scales, const Integers& integers,
                                       Sums<Config>& sums) const {
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) {
      sums[i] = fmaf(__int2float_rn(integers[i]), i % 4 < 2 ? scales.low : scales.high, sums[i]);
    }
  }

  const bool folds_;
  const int record_bytes_;  // of all records of a slot
  const uint32_t last_;     // `full` of the slice's last slot
  Place<Config> at_;
  uint32_t before_ = 0;  // `full` of the slot before
  LaneCodes<kBits> codes_[2];
  LaneMetaBits meta_ = {};
  Scales scales_ = {1, 1};  // of the step that was decoded last
  Operand operands_[2];     // of a step and of the next one
};

}  // namespace
}  // namespace awqd::cuda
