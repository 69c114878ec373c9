// Writes an AutoAWQ checkpoint of one made-up mixture of experts:
//   make_expert_stack <new folder> <experts> <hidden> <middle>
// with the weights model.layers.0.mlp.experts.E.{gate,up,down}_proj, groups of 128. Codes are all 0
// and are holes of the file, so that it takes little of the disk whatever it holds; zeros and
// scales differ, so that elements do too.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "tests/gpu/safetensors_header.h"

namespace {

constexpr int64_t kGroup = 128;

struct Tensor {
  std::string name, dtype;
  int64_t rows, cols, element_bytes;
  bool hole;
  int64_t bytes() const { return rows * cols * element_bytes; }
};

void AddLinear(const std::string& path, int64_t k, int64_t n, std::vector<Tensor>* out) {
  out->push_back({path + ".qweight", "I32", k, n / 8, 4, true});
  out->push_back({path + ".qzeros", "I32", k / kGroup, n / 8, 4, false});
  out->push_back({path + ".scales", "F16", k / kGroup, n, 2, false});
}

// Zeros of any four bits; FP16 scales of 0.0039 to 0.0117.
std::string Bytes(const Tensor& tensor, uint32_t* random) {
  std::string out(tensor.bytes(), '\0');
  for (size_t i = 0; i < out.size(); ++i) {
    *random = *random * 1664525u + 1013904223u;
    const bool high = tensor.dtype == "F16" && i % 2 == 1;
    out[i] = static_cast<char>(high ? 0x1c + (*random >> 24) % 6 : *random >> 24);
  }
  return out;
}

bool Write(const std::filesystem::path& folder, const std::vector<Tensor>& tensors) {
  std::filesystem::create_directories(folder);
  std::ofstream config(folder / "config.json");
  config << R"({"model_type": "made", "torch_dtype": "float16", "quantization_config": )"
         << R"({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, )"
         << R"("version": "gemm"}})";
  const std::string path = (folder / "model.safetensors").string();
  std::ofstream file(path, std::ios::binary);
  const std::string header = awqd::testing::SafetensorsHeader(tensors);
  const uint64_t length = header.size();
  for (int b = 0; b < 8; ++b) file.put(static_cast<char>(length >> (8 * b)));
  file << header;
  uint32_t random = 1;
  int64_t at = 8 + static_cast<int64_t>(header.size());
  for (const Tensor& tensor : tensors) {
    if (!tensor.hole) {
      file.seekp(at);
      const std::string bytes = Bytes(tensor, &random);
      file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    }
    at += tensor.bytes();
  }
  config.close();
  file.close();
  return config.good() && file.good();
}

}  // namespace

int main(int argc, char** argv) {
  int64_t sizes[3] = {};
  for (int i = 0; i < 3 && argc == 5; ++i) sizes[i] = std::atoll(argv[i + 2]);
  const auto [experts, hidden, middle] = sizes;
  if (experts < 1 || hidden < kGroup || middle < kGroup || hidden % kGroup || middle % kGroup) {
    std::cerr << "usage: make_expert_stack <new folder> <experts> <hidden> <middle>, the last two "
                 "multiples of 128\n";
    return 2;
  }
  std::error_code ignored;
  if (std::filesystem::exists(argv[1], ignored)) {
    std::cerr << argv[1] << " exists already\n";
    return 1;
  }
  std::vector<Tensor> tensors;
  for (int64_t e = 0; e < experts; ++e) {
    const std::string path = "model.layers.0.mlp.experts." + std::to_string(e);
    AddLinear(path + ".gate_proj", hidden, middle, &tensors);
    AddLinear(path + ".up_proj", hidden, middle, &tensors);
    AddLinear(path + ".down_proj", middle, hidden, &tensors);
  }
  if (Write(argv[1], tensors)) return 0;
  std::cerr << argv[1] << ": writing failed\n";
  return 1;
}
