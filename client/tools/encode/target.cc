// The list of targets, and what they share.
#include "client/tools/encode/target.h"

#include <cstring>
#include <utility>

#include "absl/algorithm/container.h"

namespace awqd::tools {

namespace {

template <typename T>
NewTensor Held(std::string name, std::string dtype, std::vector<int64_t> shape,
               std::vector<T> values) {
  NewTensor out = {std::move(name), std::move(dtype), std::move(shape)};
  out.bytes = static_cast<int64_t>(values.size() * sizeof(T));
  // std::function copies what it holds.
  auto held = std::make_shared<const std::vector<T>>(std::move(values));
  out.read = [held](int64_t at, absl::Span<uint8_t> to) {
    std::memcpy(to.data(), reinterpret_cast<const uint8_t*>(held->data()) + at, to.size());
    return absl::OkStatus();
  };
  return out;
}

}  // namespace

NewTensor MadeTensor(std::string name, std::string dtype, std::vector<int64_t> shape,
                     std::vector<uint8_t> bytes) {
  return Held(std::move(name), std::move(dtype), std::move(shape), std::move(bytes));
}

NewTensor MadeTensor(std::string name, std::vector<int64_t> shape, std::vector<uint32_t> words) {
  return Held(std::move(name), "I32", std::move(shape), std::move(words));
}

LinearFacts FactsOf(const HostWeight& weight) {
  LinearFacts out = {.k = weight.k,
                     .n = weight.n,
                     .bits = weight.scheme.bits,
                     .group_rows = weight.group_rows(),
                     .symmetric = weight.scheme.symmetric(),
                     .order = !weight.order.empty()};
  out.zero_at_0 = weight.scheme.zero_kind == ZeroKind::kConstant
                      ? weight.scheme.zero == 0
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
