// Reads cases.json, config.json and safetensors without the server's code.
#include "tests/e2e/inference/golden_models.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "nlohmann/json.hpp"
#include "tests/testing/npy.h"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using Json = nlohmann::json;

std::string Data(const std::string& format) { return DataPath(format); }

Json ParseFile(const std::string& path) { return Json::parse(std::ifstream(path)); }

v1::DType TypeOf(const std::string& dtype) {
  static const std::map<std::string, v1::DType> types = {
      {"F16", v1::FP16},  {"BF16", v1::BF16},     {"F32", v1::FP32},
      {"I8", v1::INT8},   {"U8", v1::UINT8},      {"I32", v1::INT32},
      {"U32", v1::INT32}, {"F8_E4M3", v1::UINT8}, {"F8_E8M0", v1::UINT8}};
  return types.at(dtype);
}

// Whether a tensor of a format's files is never read.
bool IsIgnored(const std::string& format, const std::string& suffix) {
  if (suffix == "input_scale") {
    return format == "fp8" || format == "modelopt" || format == "quark" || format == "comfy" ||
           format == "quanto";
  }
  if (suffix == "output_scale" || suffix == "input_scale_ub" || suffix == "scale_input")
    return true;
  if (suffix == "input_scale_2") return format == "quark";
  if (suffix.ends_with("_input.weight")) return true;  // a transform of compressed-tensors
  return format == "hqq" && (suffix == "packing" || suffix == "view_as_float");
}

std::string TextOf(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// The tensors of a request are stored beside the goldens, as arrays.
v1::PackedWeight InlineOfGguf(const GoldenCase& golden) {
  v1::PackedWeight out;
  out.set_format(golden.format);
  (*out.mutable_settings())["type"] = Json::parse(golden.settings).at("type");
  for (const std::string suffix : {"weight", "scale", "bias"}) {
    const auto array = testing::ReadNpy(Data("gguf") + "/goldens/" + golden.model + "." +
                                        golden.weight + "." + suffix + ".npy");
    if (!array.ok() && suffix != "weight") continue;
    v1::Tensor& tensor = (*out.mutable_tensors())[suffix];
    tensor.set_dtype(suffix == "weight" ? v1::UINT8 : v1::FP32);
    for (const int64_t dim : array->shape) tensor.add_shape(dim);
    tensor.set_raw(array->bytes);
  }
  return out;
}

// Returns quantization_config, or the settings that GPTQ or ModelOpt has in a file of its own.
Json ConfigOf(const GoldenCase& golden) {
  for (const char* const format : {"gguf", "mlx", "quanto"}) {
    if (golden.format == format) return {{"quant_method", format}};
  }
  if (golden.format == "comfy") return {{"quant_method", "comfy_quant"}};
  const Json config =
      ParseFile(golden.Folder() + "/config.json").value("quantization_config", Json());
  if (!config.is_null()) return config;
  std::ifstream gptq(golden.Folder() + "/quantize_config.json");
  if (!gptq) return ParseFile(golden.Folder() + "/hf_quant_config.json");
  Json out = Json::parse(gptq);
  out["quant_method"] = "gptq";
  return out;
}

// Where the tensors of a case begin: the prefix of their names, and their slice of how many.
struct Place {
  std::string prefix;
  int64_t slice = 0;
  int64_t slices = 1;
};

Place PlaceOf(const GoldenCase& golden, const Json& header) {
  const std::string separator = golden.format == "mxfp4" ? "_" : ".";
  const std::string codes = golden.format == "mxfp4" ? "blocks"
                            : golden.format == "mlx" ? "weight"
                                                     : "weight_packed";
  for (const auto& [name, info] : header.items()) {
    if (name.rfind(golden.weight + separator, 0) == 0) return {golden.weight + separator};
  }
  // "a.experts.2.b" is slice 2 of "a.experts.b", and "a.experts.2" of "a".
  const size_t last = golden.weight.rfind('.'), number = golden.weight.rfind('.', last - 1);
  const bool bare = golden.weight.substr(number, last - number) == ".experts";
  Place out = {
      golden.weight.substr(0, number) + (bare ? "" : golden.weight.substr(last)) + separator,
      std::stoll(golden.weight.substr((bare ? last : number) + 1))};
  out.slices = header.at(out.prefix + codes).at("shape")[0];
  return out;
}

// The settings of the group of compressed-tensors whose codes have the case's number of bits.
Json SettingsOf(const GoldenCase& golden) {
  if (!golden.settings.empty()) return Json::parse(golden.settings);
  if (golden.format == "exl3") return Json::object();  // tensors say all that a request needs
  const Json config = ConfigOf(golden);
  if (config.value("weight_block_size", Json()).is_array()) {
    return {{"block_n", config["weight_block_size"][0]},
            {"block_k", config["weight_block_size"][1]}};
  }
  if (config.contains("quantization")) return config["quantization"];
  if (config.contains("quantized_layers")) return config["quantized_layers"][golden.weight];
  if (golden.format == "hqq") {
    const Json& params = config.at("quant_config");
    // For a linear with a tag, its tensors have the settings.
    return params.value("weight_quant_params", Json::object());
  }
  if (golden.format != "int-quantized") return config;
  for (const auto& [name, group] : config.at("config_groups").items()) {
    const Json& weights = group.at("weights");
    if (weights.at("num_bits") == golden.scheme[1] - '0') return weights;
  }
  return {};
}

}  // namespace

std::string GoldenCase::Folder() const { return Data(folder) + "/" + model; }

std::vector<GoldenCase> GoldenCases(const std::string& folder) {
  const std::string goldens = Data(folder) + "/goldens/";
  std::vector<GoldenCase> out;
  const Json all = ParseFile(goldens + "cases.json");
  const std::string format = all.value("format", folder);
  const auto path = [&](const Json& c, const char* key) {
    return c.contains(key) ? goldens + c.at(key).get<std::string>() : "";
  };
  for (const Json& c : all.at("cases")) {
    out.push_back({folder, format, c.at("model"), c.at("weight"), c.at("description"), c.at("k"),
                   c.at("n"), c.at("dequantized_fnv1a64"), path(c, "activations"),
                   path(c, "matmul"), "", path(c, "factor"), path(c, "int8_activations"),
                   path(c, "int8_matmul"), c.contains("settings") ? c.at("settings").dump() : "",
                   c.value("hadamard_size", 0), path(c, "whole"), c.value("format", format)});
  }
  for (GoldenCase& golden : out) {
    golden.quant_method = ConfigOf(golden).value("quant_method", "modelopt");
  }
  return out;
}

v1::PackedWeight InlineOf(const GoldenCase& golden) {
  if (golden.format == "gguf") return InlineOfGguf(golden);
  v1::PackedWeight out;
  out.set_format(golden.weight_format);
  const Json settings = SettingsOf(golden);
  for (const auto& [name, value] : settings.items()) {
    static const std::vector<std::string> known = {"bits",
                                                   "group_size",
                                                   "symmetric",
                                                   "zero",
                                                   "num_bits",
                                                   "strategy",
                                                   "in_features",
                                                   "out_features",
                                                   "scale_mode",
                                                   "block_k",
                                                   "block_n",
                                                   "quant_algo",
                                                   "nbits",
                                                   "axis",
                                                   "checkpoint_format",
                                                   "desc_act",
                                                   "packing_format",
                                                   "sym",
                                                   "actorder",
                                                   "packing",
                                                   "zero_point",
                                                   "dtype",
                                                   "mode",
                                                   "hadamard_size",
                                                   "forward_dtype",
                                                   "weights",
                                                   "tensor_type",
                                                   "target_dtype",
                                                   "elem_dtype",
                                                   "is_swizzled_scales",
                                                   "format",
                                                   "scaled",
                                                   "convrot",
                                                   "convrot_groupsize"};
    static const std::vector<std::string> of_quark = {"pack_method", "qscheme", "scale_dtype",
                                                      "scale_format", "stage_dtype"};
    const auto has = [&setting = name](const std::vector<std::string>& names) {
      return std::find(names.begin(), names.end(), setting) != names.end();
    };
    if (value.is_null() || !(has(known) || (golden.format == "quark" && has(of_quark)))) continue;
    // A group longer than K is all of K, which a request writes as -1.
    const bool all = name == "group_size" && value.is_number() && golden.k > 0 && value > golden.k;
    (*out.mutable_settings())[name] = all ? "-1" : TextOf(value);
  }
  const std::string whole = golden.Folder();  // of ComfyUI a file
  std::ifstream file(whole.ends_with(".safetensors") ? whole : whole + "/model.safetensors",
                     std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  const Json header = Json::parse(bytes.substr(8, length));
  const Place place = PlaceOf(golden, header);
  for (const auto& [name, info] : header.items()) {
    const std::string suffix = name.substr(std::min(name.size(), place.prefix.size()));
    if (name.rfind(place.prefix, 0) != 0 || IsIgnored(golden.format, suffix)) continue;
    v1::Tensor& tensor = (*out.mutable_tensors())[suffix];
    std::vector<int64_t> shape = info.at("shape");
    const bool cut = place.slices > 1 && suffix != "weight_shape";
    if (cut) shape.erase(shape.begin());
    // Not a type of requests: two become an INT32.
    const bool numbers16 = info.at("dtype") == "I16";
    if (numbers16) shape.back() /= 2;
    for (const int64_t dim : shape) tensor.add_shape(dim);
    const uint64_t begin = info.at("data_offsets")[0], end = info.at("data_offsets")[1];
    const uint64_t size = cut ? (end - begin) / place.slices : end - begin;
    const std::string raw = bytes.substr(8 + length + begin + (cut ? place.slice * size : 0), size);
    if (info.at("dtype") == "I64") {  // not a type of requests
      tensor.set_dtype(v1::INT32);
      for (size_t i = 0; i < raw.size(); i += 8) *tensor.mutable_raw() += raw.substr(i, 4);
      continue;
    }
    tensor.set_dtype(numbers16 ? v1::INT32 : TypeOf(info.at("dtype")));
    tensor.set_raw(raw);
  }
  return out;
}

}  // namespace awqd
