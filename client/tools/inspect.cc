// Reads a folder for its report.
#include "client/tools/inspect.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kWholeBytes = 64 << 20;    // of a linear that is decoded at once
constexpr int64_t kRowsBytes = 16 << 20;     // of some rows of another
constexpr int64_t kBesideBytes = 256 << 20;  // of a linear's tensors beside its codes

// Whether codes hold their own scales, of which nothing is known before they are read.
bool ScalesAmongCodes(const HostWeight& described) {
  return described.scales.empty() && described.shape().cells() > 0 &&
         described.scheme.scale_bytes() > 0;
}

// Decodes codes [N, K] some rows at a time, for their scales.
absl::Status CheckRows(const model::Checkpoint& checkpoint, const model::LinearLocation& linear,
                       std::vector<uint8_t>* scratch) {
  const model::TensorInfo& codes = *linear.codes().info;
  const int64_t rows = codes.shape[0], row_bytes = codes.bytes() / rows;
  if (row_bytes > kRowsBytes) {
    return BadValue("codes", absl::StrCat(row_bytes, " bytes of one row"),
                    absl::StrCat("at most ", kRowsBytes));
  }
  const int64_t step = kRowsBytes / row_bytes;
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    const model::TensorInfo some = {codes.dtype,
                                    {count, codes.shape[1]},
                                    codes.begin + begin * row_bytes,
                                    codes.begin + (begin + count) * row_bytes};
    model::LinearLocation piece = {.path = linear.path, .bytes = some.bytes(), .rule = linear.rule};
    piece.tensors.emplace(linear.rule->format->suffixes.front(),
                          model::TensorLocation{linear.codes().file, &some});
    AWQD_ASSIGN_OR_RETURN(const HostWeight weight, checkpoint.Read(piece, scratch));
    AWQD_RETURN_IF_ERROR(Validate(weight));
  }
  return absl::OkStatus();
}

// A linear, and of a large one all but its codes. Never more than a part of that is in memory.
absl::StatusOr<HostWeight> ReadForReport(const model::Checkpoint& checkpoint,
                                         const model::LinearLocation& linear, bool* codes_read,
                                         std::vector<uint8_t>* scratch, model::Remarks* remarks) {
  *codes_read = linear.bytes <= kWholeBytes;
  if (*codes_read) {
    AWQD_ASSIGN_OR_RETURN(HostWeight weight, checkpoint.Read(linear, scratch, remarks));
    AWQD_RETURN_IF_ERROR(Validate(weight));
    return weight;
  }
  const int64_t beside = linear.bytes - linear.codes().info->bytes();
  if (beside > kBesideBytes) {
    return BadValue(absl::StrCat("weight ", Quoted(linear.path)),
                    absl::StrCat(beside, " bytes of tensors beside its codes"),
                    absl::StrCat("at most ", kBesideBytes));
  }
  AWQD_ASSIGN_OR_RETURN(HostWeight weight, checkpoint.Describe(linear, scratch, remarks));
  *codes_read = ScalesAmongCodes(weight);
  if (*codes_read) {
    AWQD_RETURN_IF_ERROR(CheckRows(checkpoint, linear, scratch));
  } else {
    AWQD_RETURN_IF_ERROR(ValidateBesideCodes(weight));
  }
  return weight;
}

InspectedLinear InspectLinear(const model::Checkpoint& checkpoint,
                              const model::LinearLocation& linear, std::vector<uint8_t>* scratch,
                              model::Remarks* remarks) {
  InspectedLinear out = {.path = linear.path, .bytes = linear.bytes, .slice_of = linear.slice_of};
  const absl::StatusOr<HostWeight> weight =
      ReadForReport(checkpoint, linear, &out.codes_read, scratch, remarks);
  if (!weight.ok()) {
    out.error = std::string(weight.status().message());
    return out;
  }
  out.scheme = ToString(weight->scheme);
  out.k = weight->k;
  out.n = weight->n;
  out.order = !weight->order.empty();
  out.factor = !weight->factor.empty();
  out.hadamard = weight->hadamard.size;
  out.bias = !weight->bias.empty();
  return out;
}

void InspectTensors(const Model& model, Inspection* out) {
  for (const std::string& name : model.tensors().InOrder()) {
    const model::TensorInfo& info = *model.tensors().Find(name)->info;
    if (model.IsQuantised(name)) continue;
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
  Json out = {{"path", linear.path},     {"description", linear.scheme},
              {"in_features", linear.k}, {"out_features", linear.n},
              {"bytes", linear.bytes},   {"bits_per_weight", linear.bits_per_weight()},
              {"order", linear.order},   {"factor", linear.factor},
              {"bias", linear.bias},     {"codes_read", linear.codes_read}};
  if (linear.hadamard > 0) out["hadamard"] = linear.hadamard;
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
  return error.empty() && unserved.empty() &&
         absl::c_all_of(linears,
                        [](const InspectedLinear& linear) { return linear.error.empty(); });
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
  out.unserved = checkpoint.unserved();
  std::vector<uint8_t> scratch;
  const int64_t total = checkpoint.total_bytes();
  model::Remarks remarks;
  int64_t done = 0;
  for (const model::LinearLocation& linear : checkpoint.linears()) {
    out.linears.push_back(InspectLinear(checkpoint, linear, &scratch, &remarks));
    done += linear.bytes;
    progress(done, total);
  }
  if (!remarks.empty()) {
    absl::StrAppend(&out.note, out.note.empty() ? "" : "; ", model::ToString(remarks));
  }
  AWQD_RETURN_IF_ERROR(model.CheckUnchanged());
  return out;
}

nlohmann::ordered_json ToJson(const Inspection& inspection) {
  Json linears = Json::array(), tensors = Json::array();
  for (const InspectedLinear& linear : inspection.linears) linears.push_back(ToJson(linear));
  Json unserved = Json::array();
  for (const auto& [path, reason] : inspection.unserved) {
    unserved.push_back({{"path", path}, {"error", std::string(reason.message())}});
  }
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
          {"not_served", std::move(unserved)},
          {"not_quantised", std::move(tensors)},
          {"other_tensors", inspection.other_tensors},
          {"other_bytes", inspection.other_bytes},
          {"total_bytes", inspection.total_bytes}};
}

}  // namespace awqd::tools
