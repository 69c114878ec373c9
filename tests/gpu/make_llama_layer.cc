// Writes an AutoAWQ checkpoint of one made-up Llama-3-8B layer: make_llama_layer <new folder>.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "tests/gpu/llama_layer.h"
#include "tests/gpu/safetensors_header.h"

namespace awqd::testing {
namespace {

struct Piece {
  std::string name, dtype;
  int64_t rows, cols, element_bytes;
  std::function<uint32_t(int64_t)> at;
  int64_t bytes() const { return rows * cols * element_bytes; }
};

std::vector<Piece> Pieces() {
  std::vector<Piece> out;
  const std::vector<LayerLinear>& linears = LlamaLayer();
  for (int i = 0; i < static_cast<int>(linears.size()); ++i) {
    const LayerLinear& l = linears[i];
    const int64_t groups = l.k / kLayerGroup;
    const auto word = [i](LayerPart part) {
      return [i, part](int64_t index) { return LayerWord(i, part, index); };
    };
    const std::string path = l.path;
    out.push_back({path + ".qweight", "I32", l.k, l.n / 8, 4, word(LayerPart::kCodes)});
    out.push_back({path + ".qzeros", "I32", groups, l.n / 8, 4, word(LayerPart::kZeros)});
    out.push_back({path + ".scales", "F16", groups, l.n, 2,
                   [i](int64_t index) -> uint32_t { return LayerScale(i, index); }});
  }
  return out;
}

void WritePiece(const Piece& piece, std::ofstream& file) {
  std::string bytes(piece.bytes(), '\0');
  for (int64_t i = 0; i < piece.rows * piece.cols; ++i) {
    const uint32_t value = piece.at(i);
    for (int64_t b = 0; b < piece.element_bytes; ++b) {
      bytes[i * piece.element_bytes + b] = static_cast<char>(value >> (8 * b));
    }
  }
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

bool WriteCheckpoint(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::ofstream config(folder / "config.json");
  config << R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
 "intermediate_size": 14336, "num_hidden_layers": 1, "torch_dtype": "float16",
 "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": )"
         << kLayerGroup << R"(, "zero_point": true, "version": "gemm"}}
)";
  std::ofstream file(folder / "model.safetensors", std::ios::binary);
  const std::vector<Piece> pieces = Pieces();
  const std::string header = SafetensorsHeader(pieces);
  const uint64_t length = header.size();
  for (int b = 0; b < 8; ++b) file.put(static_cast<char>(length >> (8 * b)));
  file << header;
  for (const Piece& piece : pieces) WritePiece(piece, file);
  config.close();
  file.close();
  return config.good() && file.good();
}

}  // namespace
}  // namespace awqd::testing

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: make_llama_layer <folder>\n";
    return 2;
  }
  std::error_code ignored;
  if (std::filesystem::exists(argv[1], ignored)) {
    std::cerr << argv[1] << " exists already\n";
    return 1;
  }
  if (!awqd::testing::WriteCheckpoint(argv[1])) {
    std::cerr << argv[1] << ": writing failed\n";
    return 1;
  }
  return 0;
}
