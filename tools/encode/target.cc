// The list of targets, and what they share.
#include "tools/encode/target.h"

#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"

namespace awqd::tools {

NewTensor MadeTensor(std::string name, std::string dtype, std::vector<int64_t> shape,
                     std::vector<uint8_t> bytes) {
  NewTensor out = {std::move(name), std::move(dtype), std::move(shape)};
  out.bytes = static_cast<int64_t>(bytes.size());
  // std::function copies what it holds.
  auto held = std::make_shared<const std::vector<uint8_t>>(std::move(bytes));
  out.read = [held](int64_t at, absl::Span<uint8_t> to) {
    std::memcpy(to.data(), held->data() + at, to.size());
    return absl::OkStatus();
  };
  return out;
}

LinearFacts FactsOf(const HostWeight& weight) {
  LinearFacts out = {.k = weight.k,
                     .n = weight.n,
                     .bits = weight.description.bits,
                     .group_rows = weight.group_rows(),
                     .symmetric = weight.description.symmetric(),
                     .order = !weight.order.empty()};
  out.zero_at_0 = weight.description.zero_kind == ZeroKind::kConstant
                      ? weight.description.zero == 0
                      : absl::c_linear_search(weight.zeros, 0);
  return out;
}

absl::Span<const Target* const> AllTargets() {
  static constexpr const Target* kTargets[] = {&kAwqTarget,
                                               &kGptqTarget,
                                               &kCompressedTensorsTarget,
                                               &kGemliteTarget,
                                               &kFasterTransformerTarget,
                                               &kDenseTarget};
  return kTargets;
}

const Target* TargetNamed(absl::string_view name) {
  for (const Target* target : AllTargets()) {
    if (target->name == name) return target;
  }
  return nullptr;
}

}  // namespace awqd::tools
