// Inline weights pass the same decoder as checkpoints do, so that the two cannot differ.
#include "server/wire/packed_weight.h"

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "kernels/base/status.h"
#include "kernels/formats/format.h"
#include "server/model/placed_weight.h"
#include "server/wire/status.h"
#include "server/wire/tensor.h"
#include "server/wire/validation.h"

namespace awqd::wire {
namespace {

constexpr size_t kMaxTextBytes = 64;  // of a name or a setting
constexpr DTypeMask kDTypes =
    kFloatingMask | MaskOf(DType::kInt8) | MaskOf(DType::kUint8) | MaskOf(DType::kInt32);

// A tensor or a setting that a request gives.
struct NamedPart {
  std::string name;
  std::string field;  // in the request
  const v1::Tensor* tensor = nullptr;
  std::string setting;
};

// A request's weight in the words of its format, whichever fields it came in.
struct InlineWeight {
  const Format* format = nullptr;
  std::vector<NamedPart> tensors, settings;
};

// "packed.tensors["qweight"]"; what a client wrote is escaped and cut.
std::string MapField(absl::string_view map, absl::string_view key) {
  return absl::StrCat("packed.", map, "[\"", absl::CHexEscape(key.substr(0, kMaxTextBytes)), "\"]");
}

absl::StatusOr<const Format*> FormatOf(const v1::PackedWeight& packed) {
  const std::string& name = packed.format();
  const Format* format = FormatNamed(name.empty() ? "awq" : absl::string_view(name));
  if (format != nullptr) return format;
  const std::string known = absl::StrJoin(
      AllFormats(), ", ", [](std::string* out, const Format* f) { absl::StrAppend(out, f->name); });
  return FieldError("packed.format",
                    absl::StrCat("\"", absl::CHexEscape(name.substr(0, kMaxTextBytes)), "\""),
                    absl::StrCat("one of ", known));
}

// The fields that are older than `format`, which are those of "awq".
void AddOldFields(const v1::PackedWeight& packed, InlineWeight* out) {
  const auto tensor = [&](absl::string_view name, bool present, const v1::Tensor& value) {
    if (present) out->tensors.push_back({std::string(name), absl::StrCat("packed.", name), &value});
  };
  tensor("qweight", packed.has_qweight(), packed.qweight());
  tensor("qzeros", packed.has_qzeros(), packed.qzeros());
  tensor("scales", packed.has_scales(), packed.scales());
  tensor("bias", packed.has_bias(), packed.bias());
  const auto number = [&](absl::string_view name, int32_t value) {
    if (value == 0) return;
    out->settings.push_back(
        {std::string(name), absl::StrCat("packed.", name), nullptr, absl::StrCat(value)});
  };
  number("bits", packed.bits());
  number("group_size", packed.group_size());
}

// Checks that the format knows `name`, and that no older field says the same.
absl::Status CheckName(absl::string_view map, absl::string_view name,
                       absl::Span<const absl::string_view> known, const Format& format,
                       const std::vector<NamedPart>& before) {
  const std::string field = MapField(map, name);
  if (!absl::c_linear_search(known, name)) {
    return FieldError(
        field, "an unknown name",
        absl::StrCat("for format \"", format.name, "\" one of ", absl::StrJoin(known, ", ")));
  }
  for (const NamedPart& entry : before) {
    if (entry.field == absl::StrCat("packed.", name)) {
      return FieldError(field, absl::StrCat("a value, and ", entry.field, " too"),
                        "only one of the two");
    }
  }
  return absl::OkStatus();
}

// By name: a protocol buffer's map has an order of its own each time, and what is wrong first must
// not depend on it.
template <typename Map>
auto ByName(const Map& map) {
  std::map<absl::string_view, const typename Map::mapped_type*> out;
  for (const auto& [name, value] : map) out.emplace(name, &value);
  return out;
}

absl::StatusOr<InlineWeight> CollectParts(const v1::PackedWeight& packed) {
  InlineWeight out;
  AWQD_ASSIGN_OR_RETURN(out.format, FormatOf(packed));
  AddOldFields(packed, &out);
  if (out.format->name != "awq" && !(out.tensors.empty() && out.settings.empty())) {
    const std::string& field =
        out.tensors.empty() ? out.settings.front().field : out.tensors.front().field;
    return FieldError(field, "a value",
                      absl::StrCat("none with format \"", out.format->name,
                                   "\": use packed.tensors and packed.settings"));
  }
  for (const auto& [suffix, tensor] : ByName(packed.tensors())) {
    AWQD_RETURN_IF_ERROR(
        CheckName("tensors", suffix, out.format->suffixes, *out.format, out.tensors));
    out.tensors.push_back({std::string(suffix), MapField("tensors", suffix), tensor});
  }
  for (const auto& [name, value] : ByName(packed.settings())) {
    AWQD_RETURN_IF_ERROR(
        CheckName("settings", name, out.format->settings, *out.format, out.settings));
    AWQD_RETURN_IF_ERROR(CheckLength(*value, MapField("settings", name), kMaxTextBytes));
    out.settings.push_back({std::string(name), MapField("settings", name), nullptr, *value});
  }
  return out;
}

absl::string_view InCheckpoints(DType dtype) {
  return absl::c_find_if(kElementTypes,
                         [dtype](const ElementType& type) { return type.dtype == dtype; })
      ->in_checkpoints;
}

// "got dtype I32" -> "got dtype INT32": the names of types as the API has them.
std::string InApiTypes(absl::string_view text) {
  std::vector<std::pair<absl::string_view, absl::string_view>> names;
  for (const ElementType& type : kElementTypes) {
    if (!type.in_checkpoints.empty()) {
      names.emplace_back(type.in_checkpoints, Name(type.dtype));
    }
  }
  return absl::StrReplaceAll(text, names);
}

// The request field of a part or a setting that the decoder speaks of. A missing one is expected
// where the client put the rest.
std::string FieldNamed(const v1::PackedWeight& packed, absl::string_view map,
                       absl::string_view name, const std::vector<NamedPart>& entries) {
  for (const NamedPart& entry : entries) {
    if (absl::EndsWith(entry.field, absl::StrCat(".", name)) ||
        entry.field == MapField(map, name)) {
      return entry.field;
    }
  }
  return packed.format().empty() ? absl::StrCat("packed.", name) : MapField(map, name);
}

// The decoder speaks of a checkpoint's tensors and settings; a client knows the fields of its
// request.
absl::Status RenameFields(const absl::Status& status, const v1::PackedWeight& packed,
                          const InlineWeight& weight) {
  std::string message = InApiTypes(status.message());
  std::string field = "packed";
  for (absl::string_view suffix : weight.format->suffixes) {
    const std::string decoders = absl::StrCat("tensor \"", suffix, "\"");
    const std::string clients = FieldNamed(packed, "tensors", suffix, weight.tensors);
    if (absl::StartsWith(message, decoders)) field = clients;
    message = absl::StrReplaceAll(message, {{decoders, clients}});
  }
  for (absl::string_view name : weight.format->settings) {
    if (!absl::StartsWith(message, absl::StrCat(name, ": "))) continue;
    field = FieldNamed(packed, "settings", name, weight.settings);
    message = absl::StrCat(field, message.substr(name.size()));
  }
  for (absl::string_view member : {"dtype", "shape"}) {
    const std::string got = absl::StrCat(field, ": got ", member, " ");
    if (!absl::StartsWith(message, got)) continue;
    absl::StrAppend(&field, ".", member);
    message = absl::StrCat(field, ": got ", message.substr(got.size()));
  }
  return WithField(absl::Status(status.code(), message), field);
}

// More than the plan of a weight takes, whatever kernels there are.
constexpr int64_t kBytesOfPlan = 8 << 10;

// Without codes where they are not wanted: all else is then as it would be with them.
absl::StatusOr<HostWeight> Decode(const v1::PackedWeight& packed, const InlineWeight& weight,
                                  bool with_codes) {
  std::deque<std::string> typed;  // owns what some views point into
  LinearTensors tensors;
  for (const NamedPart& part : weight.tensors) {
    AWQD_ASSIGN_OR_RETURN(const TensorInfo info, CheckTensor(*part.tensor, kDTypes, part.field));
    const bool unread = !with_codes && part.name == weight.format->suffixes.front();
    const std::string* bytes = &part.tensor->raw();
    if (!part.tensor->has_raw() && !unread) {
      AWQD_ASSIGN_OR_RETURN(typed.emplace_back(), TypedBytes(*part.tensor, info, part.field));
      bytes = &typed.back();
    }
    tensors[part.name] = {
        .dtype = std::string(InCheckpoints(info.dtype)),
        .shape = info.shape,
        .bytes = unread ? absl::Span<const uint8_t>(nullptr, info.bytes)
                        : absl::Span<const uint8_t>(reinterpret_cast<const uint8_t*>(bytes->data()),
                                                    bytes->size())};
  }
  Setting settings;
  for (const NamedPart& setting : weight.settings) {
    settings.members[setting.name] = Setting::Typed(setting.setting);
  }
  absl::StatusOr<HostWeight> out = weight.format->Decode(settings, tensors);
  if (!out.ok()) return RenameFields(out.status(), packed, weight);
  // Settings of a checkpoint are for linears of any size, those of a request for this one.
  AWQD_ASSIGN_OR_RETURN(const int64_t group_size, ReadGroupSize(settings));
  if (group_size > out->k) {
    const absl::Status status =
        BadValue("group_size", group_size, absl::StrCat("-1 or at most K = ", out->k));
    return RenameFields(status, packed, weight);
  }
  return out;
}

}  // namespace

absl::Status CheckPacked(const v1::PackedWeight& packed, int64_t max_bytes, int64_t* before) {
  AWQD_ASSIGN_OR_RETURN(const InlineWeight weight, CollectParts(packed));
  int64_t total = before == nullptr ? 0 : *before;
  for (const NamedPart& part : weight.tensors) {
    AWQD_ASSIGN_OR_RETURN(const TensorInfo info, CheckTensor(*part.tensor, kDTypes, part.field));
    total += info.bytes;  // each is bounded by what the message really carries
  }
  if (total > max_bytes) {
    return WithField(absl::ResourceExhaustedError(absl::StrCat(
                         "packed: got ", total, " bytes of tensors, expected at most ", max_bytes,
                         " (the server's max_inline_weight_bytes); load large weights as a model")),
                     "packed");
  }
  if (before != nullptr) *before = total;
  return absl::OkStatus();
}

absl::StatusOr<PackedSize> MeasurePacked(const v1::PackedWeight& packed, const DeviceInfo& device) {
  AWQD_ASSIGN_OR_RETURN(const InlineWeight weight, CollectParts(packed));
  PackedSize out;
  AWQD_ASSIGN_OR_RETURN(const HostWeight host, Decode(packed, weight, /*with_codes=*/false));
  AWQD_ASSIGN_OR_RETURN(out.prepared, model::MeasureMost(host, device));
  out.plans = kBytesOfPlan;
  out.decoded = model::HostBytes(host) + host.k * host.n * weight.format->spare_bytes_per_code;
  for (const NamedPart& part : weight.tensors) {
    if (part.tensor->has_raw()) continue;
    AWQD_ASSIGN_OR_RETURN(const TensorInfo info, CheckTensor(*part.tensor, kDTypes, part.field));
    out.decoded += info.bytes;
  }
  // The host packs for another device's memory in its own.
  if (device.kind != DeviceKind::kCpu) out.decoded += out.prepared;
  return out;
}

absl::Status CheckPrepared(const PackedSize& size, int64_t max_bytes) {
  const int64_t most = 2 * max_bytes;
  if (size.prepared <= most) return absl::OkStatus();
  return WithField(
      absl::ResourceExhaustedError(absl::StrCat(
          "packed: got ", size.prepared, " bytes once prepared for the device, expected at most ",
          most, " (twice the server's max_inline_weight_bytes): few rows, or groups of few, are ",
          "padded; load large weights as a model")),
      "packed");
}

absl::StatusOr<HostWeight> DecodePacked(const v1::PackedWeight& packed) {
  AWQD_ASSIGN_OR_RETURN(const InlineWeight weight, CollectParts(packed));
  return Decode(packed, weight, /*with_codes=*/true);
}

}  // namespace awqd::wire
