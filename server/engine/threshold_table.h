// ThresholdTable: the number of tokens from which a weight is dequantised before its product;
// fixed, or measured for each shape.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "kernels/base/mutex.h"
#include "kernels/device.h"
#include "kernels/plan/plan.h"
#include "kernels/registry.h"
#include "kernels/weight.h"

namespace awqd::engine {

// A product is fused below the threshold. From it on, decoding the weight once and multiplying it by
// a dense product is cheaper than decoding it again for every tile of tokens. 0: never fused.
//
// Thread-safe. Entries are kept by scheme and shape for the life of the process, so that a second
// weight or a reload of the same shape measures nothing.
class ThresholdTable {
 public:
  // Instead of a count: measure each shape when it is first loaded.
  static constexpr int64_t kAuto = -1;
  // Instead of a count: what was measured of the weight's fused kernel (KernelRow::dense_from), else
  // kDefault. Nothing is measured at run time, so runs on equal devices agree.
  static constexpr int64_t kByKernel = -2;
  // Also what weights that were never measured get under kAuto.
  static constexpr int64_t kDefault = kDefaultDenseFrom;
  // No batch is that large: the weight is never decoded first, unless a request asks for it.
  static constexpr int64_t kNever = kNeverDense;

  // `threshold`: tokens, kAuto or kByKernel.
  ThresholdTable(int64_t threshold, Device* device) : threshold_(threshold), device_(device) {}

  int64_t FindThreshold(const DeviceWeight& weight) const;

  // Under kAuto, times both paths on the device for some token counts and keeps the smallest of
  // them from which decoding first is faster (kNever: none). A few products; blocks.
  absl::Status MeasureThreshold(const DeviceWeight& weight);

 private:
  static std::string MakeKey(const DeviceWeight& weight);

  const int64_t threshold_;
  Device* const device_;
  mutable Mutex mu_;
  std::map<std::string, int64_t> measured_ ABSL_GUARDED_BY(mu_);
};

}  // namespace awqd::engine
