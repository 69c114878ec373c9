// Errors, devices, checkpoints and weights of awqd.h.
#include <optional>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_join.h"
#include "kernels/base/text.h"
#include "kernels/formats/format.h"
#include "kernels/kernels.h"
#include "kernels/library/objects.h"

namespace awqd::library {
namespace {

std::string& LastError() {
  thread_local std::string text;
  return text;
}

// Packs a decoded weight.
absl::Status Prepare(const HostWeight& host, const awqd_device& device, awqd_weight** out) {
  auto weight = std::make_unique<awqd_weight>();
  weight->device = device.device;
  AWQD_ASSIGN_OR_RETURN(weight->weight, PrepareWeight(host, *device.device));
  weight->scheme = ToString(host.scheme);
  *out = weight.release();
  return absl::OkStatus();
}

absl::Status OpenCheckpoint(const char* path, awqd_checkpoint** out) {
  AWQD_RETURN_IF_ERROR(CheckPointer("path", path));
  AWQD_RETURN_IF_ERROR(CheckPointer("checkpoint", out));
  AWQD_ASSIGN_OR_RETURN(model::ModelFolder folder, model::OpenModelFolder(path));
  AWQD_ASSIGN_OR_RETURN(model::Checkpoint checkpoint,
                        model::Checkpoint::Open(folder.root, folder.name));
  *out = new awqd_checkpoint{std::move(folder), std::move(checkpoint)};
  return absl::OkStatus();
}

absl::Status Load(awqd_device* device, const awqd_checkpoint* from, const char* linear,
                  awqd_weight** out) {
  AWQD_RETURN_IF_ERROR(CheckPointer("device", device));
  AWQD_RETURN_IF_ERROR(CheckPointer("checkpoint", from));
  AWQD_RETURN_IF_ERROR(CheckPointer("linear", linear));
  AWQD_RETURN_IF_ERROR(CheckPointer("weight", out));
  const model::Checkpoint& checkpoint = from->checkpoint;
  const absl::Span<const model::LinearLocation> linears = checkpoint.linears();
  const auto found =
      absl::c_find_if(linears, [&](const auto& location) { return location.path == linear; });
  if (found == linears.end()) {
    const auto unserved = checkpoint.unserved().find(linear);
    if (unserved != checkpoint.unserved().end()) return unserved->second;
    return absl::NotFoundError(absl::StrCat("linear ", Quoted(linear), ": not in ",
                                            Quoted(from->folder.path, 1024), ", which has ",
                                            linears.size(), " quantised linears"));
  }
  std::vector<uint8_t> scratch;
  AWQD_ASSIGN_OR_RETURN(const HostWeight host, checkpoint.Read(*found, &scratch));
  AWQD_RETURN_IF_ERROR(checkpoint.CheckUnchanged(from->folder.root));
  return Prepare(host, *device, out);
}

absl::Status ReadTensor(const awqd_tensor& tensor, absl::string_view name, LinearTensors* out) {
  AWQD_RETURN_IF_ERROR(CheckPointer(absl::StrCat(name, ".suffix"), tensor.suffix));
  AWQD_RETURN_IF_ERROR(CheckPointer(absl::StrCat(name, ".dtype"), tensor.dtype));
  if (tensor.rank > 0)
    AWQD_RETURN_IF_ERROR(CheckPointer(absl::StrCat(name, ".shape"), tensor.shape));
  if (tensor.bytes > 0)
    AWQD_RETURN_IF_ERROR(CheckPointer(absl::StrCat(name, ".data"), tensor.data));
  TensorView view = {.dtype = tensor.dtype,
                     .shape = {tensor.shape, tensor.shape + tensor.rank},
                     .bytes = {static_cast<const uint8_t*>(tensor.data), tensor.bytes}};
  if (out->emplace(tensor.suffix, std::move(view)).second) return absl::OkStatus();
  return BadValue(absl::StrCat(name, ".suffix"), Quoted(tensor.suffix), "each suffix once");
}

absl::Status Pack(awqd_device* device, const char* name, absl::Span<const awqd_setting> settings,
                  absl::Span<const awqd_tensor> tensors, awqd_weight** out) {
  AWQD_RETURN_IF_ERROR(CheckPointer("device", device));
  AWQD_RETURN_IF_ERROR(CheckPointer("format", name));
  AWQD_RETURN_IF_ERROR(CheckPointer("weight", out));
  const Format* const format = FormatNamed(name);
  if (format == nullptr) {
    return BadValue("format", Quoted(name),
                    absl::StrJoin(AllFormats(), ", ", [](std::string* text, const Format* one) {
                      absl::StrAppend(text, one->name);
                    }));
  }
  Setting given;
  for (size_t i = 0; i < settings.size(); ++i) {
    const std::string place = absl::StrCat("settings[", i, "]");
    AWQD_RETURN_IF_ERROR(CheckPointer(absl::StrCat(place, ".name"), settings[i].name));
    AWQD_RETURN_IF_ERROR(CheckPointer(absl::StrCat(place, ".value"), settings[i].value));
    if (!absl::c_linear_search(format->settings, settings[i].name)) {
      return BadValue(absl::StrCat(place, ".name"), Quoted(settings[i].name),
                      OneOf(format->settings));
    }
    given.members[settings[i].name] = Setting::Typed(settings[i].value);
  }
  LinearTensors views;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string place = absl::StrCat("tensors[", i, "]");
    AWQD_RETURN_IF_ERROR(ReadTensor(tensors[i], place, &views));
    if (!absl::c_linear_search(format->suffixes, tensors[i].suffix)) {
      return BadValue(absl::StrCat(place, ".suffix"), Quoted(tensors[i].suffix),
                      OneOf(format->suffixes));
    }
  }
  AWQD_ASSIGN_OR_RETURN(const HostWeight host, format->Decode(given, views));
  return Prepare(host, *device, out);
}

absl::Status OpenDevice(const char* name, const awqd_device_options* options, awqd_device** out) {
  AWQD_RETURN_IF_ERROR(CheckPointer("name", name));
  AWQD_RETURN_IF_ERROR(CheckPointer("device", out));
  DeviceOptions chosen;
  if (options != nullptr) {
    AWQD_RETURN_IF_ERROR(CheckStructure("options", options));
    if (options->memory_budget < 0) {
      return BadValue("options->memory_budget", options->memory_budget, "0 or more bytes");
    }
    if (options->cpu_threads < 0) {
      return BadValue("options->cpu_threads", options->cpu_threads, "0 or more");
    }
    chosen.budget_bytes = options->memory_budget;
    chosen.cpu_threads = options->cpu_threads;
    chosen.batch_invariant = options->batch_invariant != 0;
  }
  AWQD_ASSIGN_OR_RETURN(std::shared_ptr<Device> device, awqd::OpenDevice(name, chosen));
  *out = new awqd_device{std::move(device)};
  return absl::OkStatus();
}

}  // namespace

int Report(const absl::Status& status) noexcept {
  if (status.ok()) return AWQD_OK;
  try {
    LastError().assign(status.message().data(), status.message().size());
  } catch (...) {
    LastError().clear();
  }
  return static_cast<int>(status.code());
}

}  // namespace awqd::library

using awqd::library::Call;
using awqd::library::CheckPointer;

uint32_t awqd_abi_version(void) { return AWQD_ABI_VERSION; }
const char* awqd_version(void) { return AWQD_VERSION; }
const char* awqd_error_message(void) { return awqd::library::LastError().c_str(); }

int awqd_device_open(const char* name, const awqd_device_options* options, awqd_device** device) {
  return Call([&] { return awqd::library::OpenDevice(name, options, device); });
}
void awqd_device_close(awqd_device* device) { delete device; }
const char* awqd_device_name(const awqd_device* device) {
  return device->device->info().id.c_str();
}

int awqd_checkpoint_open(const char* path, awqd_checkpoint** checkpoint) {
  return Call([&] { return awqd::library::OpenCheckpoint(path, checkpoint); });
}
void awqd_checkpoint_close(awqd_checkpoint* checkpoint) { delete checkpoint; }
size_t awqd_checkpoint_linears(const awqd_checkpoint* checkpoint) {
  return checkpoint->checkpoint.linears().size();
}
const char* awqd_checkpoint_linear(const awqd_checkpoint* checkpoint, size_t index) {
  const auto linears = checkpoint->checkpoint.linears();
  return index < linears.size() ? linears[index].path.c_str() : nullptr;
}

int awqd_weight_load(awqd_device* device, const awqd_checkpoint* checkpoint, const char* linear,
                     awqd_weight** weight) {
  return Call([&] { return awqd::library::Load(device, checkpoint, linear, weight); });
}
int awqd_weight_pack(awqd_device* device, const char* format, const awqd_setting* settings,
                     size_t settings_count, const awqd_tensor* tensors, size_t tensors_count,
                     awqd_weight** weight) {
  return Call([&]() -> absl::Status {
    if (settings_count > 0) AWQD_RETURN_IF_ERROR(CheckPointer("settings", settings));
    if (tensors_count > 0) AWQD_RETURN_IF_ERROR(CheckPointer("tensors", tensors));
    return awqd::library::Pack(device, format, {settings, settings_count}, {tensors, tensors_count},
                               weight);
  });
}
void awqd_weight_free(awqd_weight* weight) { delete weight; }

int awqd_weight_describe(const awqd_weight* weight, awqd_weight_info* info) {
  return Call([&]() -> absl::Status {
    AWQD_RETURN_IF_ERROR(CheckPointer("weight", weight));
    AWQD_RETURN_IF_ERROR(awqd::library::CheckStructure("info", info));
    const awqd::DeviceWeight& from = *weight->weight;
    *info = {.size = sizeof(*info),
             .k = from.shape.k,
             .n = from.shape.n,
             .bytes = from.bytes(),
             .format = from.format.c_str(),
             .scheme = weight->scheme.c_str(),
             .has_bias = from.bias() != nullptr,
             .transforms_input = from.transforms_input()};
    return absl::OkStatus();
  });
}
