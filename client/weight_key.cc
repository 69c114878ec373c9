// The same rule as client/python's.
#include "client/weight_key.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace awqd::client {
namespace {

constexpr size_t kLongest = 512;

}  // namespace

std::string WeightKey(absl::string_view model, absl::string_view weight) {
  if (model.empty() || weight.empty()) return "";
  std::string key = absl::StrCat(model, "/", weight);
  if (key.size() > kLongest || !std::all_of(key.begin(), key.end(), absl::ascii_isprint)) return "";
  return key;
}

void AddWeightKey(const std::string& key, grpc::ClientContext& context) {
  if (!key.empty()) context.AddMetadata("awqd-weight", key);
}

}  // namespace awqd::client
