// ThresholdTable: a binary search over token counts, each decided by timing both paths.
#include "server/engine/threshold_table.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <memory>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/status.h"
#include "kernels/kernels.h"

namespace awqd::engine {
namespace {

// Below the first no weight is worth decoding first; from past the last on, none was seen to lose
// by it.
constexpr int64_t kTokens[] = {32, 64, 96, 128, 192, 256, 384, 512, 768, 1024};
constexpr int64_t kMostTokens = *std::prev(std::end(kTokens));
constexpr int kRuns = 3;

// Device buffers for products of up to kMostTokens rows. Their contents do not matter for time.
struct Buffers {
  std::unique_ptr<Stream> stream;
  Buffer x, y, workspace;
};

absl::StatusOr<Buffers> AllocateBuffers(const DeviceWeight& weight, Device& device) {
  Buffers out;
  AWQD_ASSIGN_OR_RETURN(out.stream, device.CreateStream());
  const int64_t scratch = std::max(WorkspaceBytes(weight, Path::kFused, kMostTokens),
                                   WorkspaceBytes(weight, Path::kDequantize, kMostTokens));
  AWQD_ASSIGN_OR_RETURN(out.x,
                        device.Allocate(MemoryKind::kDevice, kMostTokens * weight.shape.k * 2));
  AWQD_ASSIGN_OR_RETURN(out.y,
                        device.Allocate(MemoryKind::kDevice, kMostTokens * weight.shape.n * 2));
  AWQD_ASSIGN_OR_RETURN(out.workspace,
                        device.Allocate(MemoryKind::kDevice, std::max<int64_t>(scratch, 256)));
  return out;
}

// The least time of a product of `tokens` rows on `path`, of kRuns after one that warms up.
absl::StatusOr<absl::Duration> MeasureProduct(const DeviceWeight& weight, const Buffers& buffers,
                                              int64_t tokens, Path path) {
  MatmulArgs args;
  args.weight = &weight;
  args.x = {buffers.x.data(), DType::kFp16, tokens, weight.shape.k};
  args.y = {buffers.y.data(), DType::kFp16, tokens, weight.shape.n};
  args.workspace = buffers.workspace.data();
  absl::Duration least = absl::InfiniteDuration();
  for (int run = 0; run <= kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    AWQD_RETURN_IF_ERROR(QuantizedMatmul(args, path, buffers.stream->view()));
    AWQD_RETURN_IF_ERROR(buffers.stream->Synchronize());
    if (run > 0)
      least = std::min(least, absl::FromChrono(std::chrono::steady_clock::now() - start));
  }
  return least;
}

}  // namespace

std::string ThresholdTable::MakeKey(const DeviceWeight& weight) {
  const DeviceInfo& info = weight.device->info();
  return absl::StrCat(info.name, " ", ToString(weight.shape.scheme), " ", weight.shape.k, "x",
                      weight.shape.n);
}

int64_t ThresholdTable::FindThreshold(const DeviceWeight& weight) const {
  if (threshold_ == kByKernel) {
    return DenseThreshold(weight.plan, weight.shape, device_->info());
  }
  if (threshold_ != kAuto) return threshold_;
  MutexLock lock(&mu_);
  const auto it = measured_.find(MakeKey(weight));
  return it == measured_.end() ? kDefault : it->second;
}

absl::Status ThresholdTable::MeasureThreshold(const DeviceWeight& weight) {
  if (threshold_ != kAuto) return absl::OkStatus();
  const std::string key = MakeKey(weight);
  {
    MutexLock lock(&mu_);
    if (measured_.contains(key)) return absl::OkStatus();
  }
  int64_t threshold = kNever;
  if (absl::c_any_of(weight.plan.matmul,
                     [](const PlanEntry& entry) { return entry.path == Path::kDequantize; })) {
    AWQD_ASSIGN_OR_RETURN(const Buffers buffers, AllocateBuffers(weight, *device_));
    // Decoding once pays more the more tokens share it, so the answers are ordered: no's, then
    // yes's.
    auto low = std::begin(kTokens), high = std::end(kTokens);
    while (low != high) {
      const auto middle = low + (high - low) / 2;
      AWQD_ASSIGN_OR_RETURN(const absl::Duration fused,
                            MeasureProduct(weight, buffers, *middle, Path::kFused));
      AWQD_ASSIGN_OR_RETURN(const absl::Duration dense,
                            MeasureProduct(weight, buffers, *middle, Path::kDequantize));
      if (dense < fused) {
        threshold = *middle;
        high = middle;
      } else {
        low = middle + 1;
      }
    }
  }
  MutexLock lock(&mu_);
  measured_[key] = threshold;
  return absl::OkStatus();
}

}  // namespace awqd::engine
