// Fuzzes the decoding of every format: any settings, and tensors of any dtype, shape and contents.
//
// Then a checkpoint of the same tensors and settings: every tensor is accounted for, and none that
// holds codes is passed over.
//
// Input: the format, its settings, then for each tensor a dtype, a rank and dimensions, and its
// data; then flags, and metadata of the codes where they say so. Numbers that do not fit a format fail its first check, so shapes have few values.
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/checkpoint/checkpoint.h"
#include "kernels/checkpoint/tensor_names.h"
#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/fuzz/require.h"

namespace {

using awqd::fuzz::Require;

// Takes bytes from the front of the input; zeros once it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t Byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  // Mostly small, since a decode needs equal dimensions; sometimes huge or negative.
  int64_t Dimension() {
    const uint8_t byte = Byte();
    if (byte < 0xf0) return byte;
    return static_cast<int64_t>(uint64_t{Byte()} << (8 * (byte & 7)));
  }
  std::string Rest() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const uint8_t* data_;
  size_t size_;
};

constexpr const char* kDtypes[] = {"I32", "F16", "BF16", "F32", "U8", "I8", "F64", "I16"};
constexpr const char* kWords[] = {"true",
                                  "false",
                                  "channel",
                                  "group",
                                  "tensor",
                                  "gemm",
                                  "",
                                  "x",
                                  "multiply",
                                  "fp8",
                                  "fp8_pb_wo",
                                  "mxfp8",
                                  "nvfp4",
                                  "w4a16_awq",
                                  "block",
                                  "dense",
                                  "padded",
                                  "weight",
                                  "gemv",
                                  "gemv_fast",
                                  "marlin",
                                  "q4_1",
                                  "q5_k",
                                  "q6_k",
                                  "mxfp4",
                                  "gptq",
                                  "gptq_v2",
                                  "gptq_p",
                                  "auto_round",
                                  "auto_round:auto_gptq",
                                  "auto_round:auto_awq",
                                  "auto_round:gptqmodel",
                                  "fp8_per_channel_per_token",
                                  "nvfp4_awq",
                                  "fp4",
                                  "fp8_e4m3",
                                  "int8",
                                  "int4",
                                  "uint4",
                                  "q1_0",
                                  "q2_k",
                                  "q3_k",
                                  "iq4_nl",
                                  "iq4_xs",
                                  "tq1_0",
                                  "tq2_0",
                                  "affine",
                                  "q2_0",
                                  "iq2_xxs",
                                  "iq2_xs",
                                  "iq2_s",
                                  "iq3_xxs",
                                  "iq3_s",
                                  "iq1_s",
                                  "iq1_m",
                                  "float8_e4m3fn",
                                  "int8_tensorwise",
                                  "convrot_w4a4",
                                  "asym_w4a8_int8",
                                  "awq_w4a16",
                                  "int8tensor",
                                  "intxunpackedtoint8tensor",
                                  "float8tensor",
                                  "int4tensor",
                                  "mxtensor",
                                  "nvfp4tensor",
                                  "float8",
                                  "int2",
                                  "dynamic",
                                  "static",
                                  "fp8_dynamic",
                                  "fp8_blocks",
                                  "fp8_static"};
static_assert(std::size(kWords) <= 96, "a byte from 0xa0 on says which");
constexpr int64_t kMaxBytes = 1 << 18;

// Absent, a small number, or a word that some format knows.
void AddSetting(absl::string_view name, Input* in, awqd::Setting* settings) {
  const uint8_t head = in->Byte();
  if (head < 0x40) return;
  const std::string text = head < 0xa0 ? absl::StrCat(static_cast<int8_t>(in->Byte()))
                                       : kWords[(head - 0xa0) % std::size(kWords)];
  settings->members[std::string(name)] = awqd::Setting::Typed(text);
}

// The bytes that fit a small shape, so that decoding passes the first check.
int64_t FittingBytes(const awqd::TensorView& tensor) {
  int64_t bytes = tensor.dtype == "I32" || tensor.dtype == "F32"                             ? 4
                  : tensor.dtype == "F16" || tensor.dtype == "BF16" || tensor.dtype == "I16" ? 2
                                                                                             : 1;
  for (int64_t dim : tensor.shape) {
    if (dim <= 0 || dim > kMaxBytes / bytes) return 0;
    bytes *= dim;
  }
  return bytes;
}

// Every part exists in its full size, and every element can be read.
void CheckDecoded(const awqd::Format& format, const awqd::HostWeight& weight) {
  Require(awqd::Validate(weight).ok());
  Require(weight.format == format.name);
  for (int64_t row : {int64_t{0}, weight.k - 1}) {
    for (int64_t col : {int64_t{0}, weight.n - 1}) (void)awqd::WeightValue(weight, row, col);
  }
}

// Describes the same linear without its codes: only they are missing.
void CheckDescribed(const awqd::Format& format, const awqd::Setting& settings,
                    awqd::LinearTensors tensors, const absl::StatusOr<awqd::HostWeight>& weight) {
  const auto codes = tensors.find(format.suffixes.front());
  if (codes == tensors.end() || codes->second.bytes.empty()) return;
  codes->second.bytes = absl::Span<const uint8_t>(nullptr, codes->second.bytes.size());
  const auto described = format.Decode(settings, tensors);
  if (!weight.ok()) return;
  Require(described.ok() && described->codes.empty());
  Require(described->k == weight->k && described->n == weight->n);
  Require(described->scheme == weight->scheme && described->order == weight->order);
}

void Write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// The tensors of one linear as a file, where their sizes are those of their shapes. ComfyUI has the
// settings in its header, or in a tensor.
std::string FileOf(const awqd::Format& format, const awqd::LinearTensors& tensors,
                   const nlohmann::json& settings) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  if (&format == &awqd::kComfyFormat && !tensors.contains("comfy_quant")) {
    const nlohmann::json layers = {{"layers", {{"l.up", settings}}}};
    header["__metadata__"] = {{"_quantization_metadata", layers.dump()}};
  }
  for (const auto& [suffix, tensor] : tensors) {
    const size_t begin = data.size();
    data.append(tensor.bytes.begin(), tensor.bytes.end());
    header[absl::StrCat("l.up", format.separator, suffix)] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(uint64_t{text.size()} >> (8 * i)));
  return out + text + data;
}

void CheckAccount(const awqd::Format& format, const awqd::Setting& settings,
                  const awqd::LinearTensors& tensors) {
  static const std::string folder = [] {
    std::string pattern = (std::filesystem::temp_directory_path() / "awqd-fuzz-XXXXXX").string();
    Require(mkdtemp(pattern.data()) != nullptr);
    std::filesystem::create_directory(pattern + "/m");
    return pattern;
  }();
  nlohmann::json config = {{"quant_method", format.quant_method}};
  for (const auto& [name, value] : settings.members) {
    const auto number = nlohmann::json::parse(value.text, nullptr, /*allow_exceptions=*/false);
    config[name] = number.is_discarded() ? nlohmann::json(value.text) : number;
  }
  Write(folder + "/m/config.json", nlohmann::json{{"quantization_config", config}}.dump());
  Write(folder + "/m/model.safetensors", FileOf(format, tensors, config));
  const auto root = awqd::model::RepositoryRoot::Open(folder);
  const bool alone = &format == &awqd::kComfyFormat;
  const auto checkpoint = awqd::model::Checkpoint::Open(*root, alone ? "m/model.safetensors" : "m");
  if (!checkpoint.ok()) {
    Require(absl::IsInvalidArgument(checkpoint.status()) ||
            absl::IsUnimplemented(checkpoint.status()) ||
            (alone && absl::IsNotFound(checkpoint.status())));
    return;
  }
  Require(checkpoint->tensors().size() == tensors.size());
  for (const auto& [name, place] : checkpoint->tensors()) {
    Require(!place.served || place.unserved == nullptr);
    Require(place.quantised() || !awqd::model::ParseCodes(name, *place.info).certain);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const auto formats = awqd::AllFormats();
  const awqd::Format& format = *formats[in.Byte() % formats.size()];
  awqd::Setting settings;
  for (absl::string_view name : format.settings) AddSetting(name, &in, &settings);
  std::vector<std::vector<uint8_t>> storage;
  storage.reserve(format.suffixes.size());
  awqd::LinearTensors tensors;
  for (absl::string_view suffix : format.suffixes) {
    const uint8_t head = in.Byte();
    if (head & 0x80) continue;
    awqd::TensorView tensor;
    tensor.dtype = kDtypes[head & 7];
    for (int rank = head >> 4 & 3; rank > 0; --rank) tensor.shape.push_back(in.Dimension());
    storage.emplace_back(FittingBytes(tensor) + (head & 8 ? 1 : 0));
    for (size_t i = 0; i < std::min<size_t>(storage.back().size(), 64); ++i) {
      storage.back()[i] = in.Byte();
    }
    tensor.bytes = storage.back();
    tensors.emplace(std::string(suffix), tensor);
  }
  constexpr uint8_t kAccount = 1, kMetadata = 2;
  const uint8_t flags = in.Byte();
  const auto codes = tensors.find(format.suffixes.front());
  if ((flags & kMetadata) != 0 && codes != tensors.end()) codes->second.metadata = in.Rest();
  const auto weight = format.Decode(settings, tensors);
  if (weight.ok()) {
    CheckDecoded(format, *weight);
  } else {
    Require(weight.status().code() == absl::StatusCode::kInvalidArgument);
  }
  CheckDescribed(format, settings, tensors, weight);
  if ((flags & kAccount) != 0) CheckAccount(format, settings, tensors);
  return 0;
}
