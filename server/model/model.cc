// Counting what cannot be served.
#include "server/model/losses.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace awqd::model {
namespace {

bool Lost(const PlacedWeight& weight) {
  const auto dead = [](const WeightPart& part) { return !part.weight->device->healthy(); };
  return weight.cut() ? absl::c_any_of(weight.parts, dead) : absl::c_all_of(weight.parts, dead);
}

}  // namespace

std::string Losses::Message() const {
  if (devices.empty()) return "";
  if (weights == 0) return absl::StrCat("failed: ", devices, "; the model serves without");
  return absl::StrCat("failed: ", devices, ", and with it ", weights,
                      weights == 1 ? " weight" : " weights",
                      "; loading the model again puts it on the devices that are left");
}

Losses LossesOf(const Model& model) {
  Losses out;
  for (const auto& [device, bytes] : model.bytes_on) {
    if (device->healthy()) continue;
    absl::StrAppend(&out.devices, out.devices.empty() ? "" : ",", device->info().id);
  }
  if (out.devices.empty()) return out;
  out.weights = absl::c_count_if(model.weights, [](const auto& w) { return Lost(*w.second); });
  return out;
}

}  // namespace awqd::model
