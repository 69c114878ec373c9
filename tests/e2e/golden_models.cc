// Reads cases.json, config.json and safetensors without any of the server's code.
#include "tests/e2e/golden_models.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "nlohmann/json.hpp"
#include "tests/testing/places.h"

namespace awqd {
namespace {

using Json = nlohmann::json;

std::string Data(const std::string& format) { return DataPath(format); }

Json ParseFile(const std::string& path) { return Json::parse(std::ifstream(path)); }

v1::DType TypeOf(const std::string& dtype) {
  static const std::map<std::string, v1::DType> types = {{"F16", v1::FP16}, {"BF16", v1::BF16},
                                                         {"F32", v1::FP32}, {"I8", v1::INT8},
                                                         {"U8", v1::UINT8}, {"I32", v1::INT32}};
  return types.at(dtype);
}

std::string TextOf(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// Those of a group of compressed-tensors whose codes have as many bits as the case's.
Json SettingsOf(const GoldenCase& golden) {
  const Json config = ParseFile(golden.Folder() + "/config.json").at("quantization_config");
  if (golden.format != "int-quantized") return config;
  for (const auto& [name, group] : config.at("config_groups").items()) {
    const Json& weights = group.at("weights");
    if (weights.at("num_bits") == golden.description[1] - '0') return weights;
  }
  return {};
}

}  // namespace

std::string GoldenCase::Folder() const { return Data(format) + "/" + model; }

std::vector<GoldenCase> GoldenCases(const std::string& format) {
  const std::string goldens = Data(format) + "/goldens/";
  std::vector<GoldenCase> out;
  const Json all = ParseFile(goldens + "cases.json");
  const auto path = [&](const Json& c, const char* key) {
    return c.contains(key) ? goldens + c.at(key).get<std::string>() : "";
  };
  for (const Json& c : all.at("cases")) {
    out.push_back({format, c.at("model"), c.at("weight"), c.at("description"), c.at("k"), c.at("n"),
                   c.at("dequantized_fnv1a64"), path(c, "activations"), path(c, "matmul"),
                   path(c, "int8_activations"), path(c, "int8_matmul")});
  }
  return out;
}

v1::PackedWeight InlineOf(const GoldenCase& golden) {
  v1::PackedWeight out;
  out.set_format(golden.format);
  const Json settings = SettingsOf(golden);
  for (const auto& [name, value] : settings.items()) {
    static const std::vector<std::string> known = {"bits",        "group_size",   "symmetric",
                                                   "zero",        "num_bits",     "strategy",
                                                   "in_features", "out_features", "scale_mode"};
    if (value.is_null() || std::find(known.begin(), known.end(), name) == known.end()) continue;
    (*out.mutable_settings())[name] = TextOf(value);
  }
  std::ifstream file(golden.Folder() + "/model.safetensors", std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  const Json header = Json::parse(bytes.substr(8, length));
  for (const auto& [name, info] : header.items()) {
    if (name.rfind(golden.weight + ".", 0) != 0) continue;
    v1::Tensor& tensor = (*out.mutable_tensors())[name.substr(golden.weight.size() + 1)];
    tensor.set_dtype(TypeOf(info.at("dtype")));
    for (const int64_t dim : info.at("shape")) tensor.add_shape(dim);
    const uint64_t begin = info.at("data_offsets")[0], end = info.at("data_offsets")[1];
    tensor.set_raw(bytes.substr(8 + length + begin, end - begin));
  }
  return out;
}

}  // namespace awqd
