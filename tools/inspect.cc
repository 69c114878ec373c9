// Reading a folder for its report.
#include "tools/inspect.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

using Json = nlohmann::ordered_json;

InspectedLinear InspectLinear(const model::Checkpoint& checkpoint,
                              const model::LinearLocation& linear, std::vector<uint8_t>* scratch) {
  InspectedLinear out = {.path = linear.path, .bytes = linear.bytes, .slice_of = linear.slice_of};
  absl::StatusOr<HostWeight> weight = checkpoint.Read(linear, scratch);
  absl::Status status = weight.status();
  if (status.ok()) status = Validate(*weight);
  if (!status.ok()) {
    out.error = std::string(status.message());
    return out;
  }
  out.description = ToString(weight->description);
  out.k = weight->k;
  out.n = weight->n;
  out.order = !weight->order.empty();
  out.factor = !weight->factor.empty();
  out.bias = !weight->bias.empty();
  return out;
}

void InspectTensors(const Model& model, Inspection* out) {
  for (const std::string& name : model.tensors().InOrder()) {
    const model::TensorInfo& info = *model.tensors().Find(name)->info;
    if (model.IsPart(name)) continue;
    if (info.shape.size() < 2) {
      ++out->other_tensors;
      out->other_bytes += info.bytes();
      continue;
    }
    out->not_quantised.push_back(
        {name, info.dtype, info.shape, info.bytes(), model.WhyNotQuantised(name)});
  }
}

Json ToJson(const InspectedLinear& linear) {
  Json out = {{"path", linear.path},     {"description", linear.description},
              {"in_features", linear.k}, {"out_features", linear.n},
              {"bytes", linear.bytes},   {"bits_per_weight", linear.bits_per_weight()},
              {"order", linear.order},   {"factor", linear.factor},
              {"bias", linear.bias}};
  if (!linear.slice_of.empty()) out["slice_of"] = linear.slice_of;
  if (!linear.error.empty()) out["error"] = linear.error;
  return out;
}

}  // namespace

double InspectedLinear::bits_per_weight() const {
  return k == 0
             ? 0
             : 8.0 * static_cast<double>(bytes) / (static_cast<double>(k) * static_cast<double>(n));
}

bool Inspection::loads() const {
  return error.empty() && absl::c_all_of(linears, [](const InspectedLinear& linear) {
           return linear.error.empty();
         });
}

absl::StatusOr<Inspection> Inspect(const std::string& path, const Progress& progress) {
  AWQD_ASSIGN_OR_RETURN(const Model model, Model::Open(path));
  Inspection out = {.path = path, .total_bytes = model.tensors().total_bytes()};
  InspectTensors(model, &out);
  if (!model.checkpoint().ok()) {
    out.error = std::string(model.checkpoint().status().message());
    return out;
  }
  const model::Checkpoint& checkpoint = *model.checkpoint();
  out.format = std::string(checkpoint.format().name);
  out.quant_method = checkpoint.quant_method();
  out.note = checkpoint.note();
  std::vector<uint8_t> scratch;
  int64_t done = 0;
  for (const model::LinearLocation& linear : checkpoint.linears()) {
    out.linears.push_back(InspectLinear(checkpoint, linear, &scratch));
    done += linear.bytes;
    progress(done, checkpoint.total_bytes());
  }
  AWQD_RETURN_IF_ERROR(model.CheckUnchanged());
  return out;
}

nlohmann::ordered_json ToJson(const Inspection& inspection) {
  Json linears = Json::array(), tensors = Json::array();
  for (const InspectedLinear& linear : inspection.linears) linears.push_back(ToJson(linear));
  for (const InspectedTensor& tensor : inspection.not_quantised) {
    tensors.push_back({{"tensor", tensor.name},
                       {"dtype", tensor.dtype},
                       {"shape", tensor.shape},
                       {"bytes", tensor.bytes},
                       {"why", tensor.why}});
  }
  return {{"path", inspection.path},
          {"loads", inspection.loads()},
          {"error", inspection.error},
          {"format", inspection.format},
          {"quant_method", inspection.quant_method},
          {"note", inspection.note},
          {"linears", std::move(linears)},
          {"not_quantised", std::move(tensors)},
          {"other_tensors", inspection.other_tensors},
          {"other_bytes", inspection.other_bytes},
          {"total_bytes", inspection.total_bytes}};
}

}  // namespace awqd::tools
