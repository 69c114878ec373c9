// A made-up Llama-3-8B decoder layer: every number follows from its index, so that the program that
// writes the checkpoint and the client that checks results agree without a common file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace awqd::testing {

struct LayerLinear {
  const char* path;
  int64_t k, n;
};

inline constexpr int64_t kLayerGroup = 128;

// The seven projections of one layer at their real size.
inline const std::vector<LayerLinear>& LlamaLayer() {
  static const auto* const linears = new std::vector<LayerLinear>{
      {"model.layers.0.self_attn.q_proj", 4096, 4096},
      {"model.layers.0.self_attn.k_proj", 4096, 1024},
      {"model.layers.0.self_attn.v_proj", 4096, 1024},
      {"model.layers.0.self_attn.o_proj", 4096, 4096},
      {"model.layers.0.mlp.gate_proj", 4096, 14336},
      {"model.layers.0.mlp.up_proj", 4096, 14336},
      {"model.layers.0.mlp.down_proj", 14336, 4096},
  };
  return *linears;
}

// splitmix64: a well-mixed number for each index.
constexpr uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

enum class LayerPart : uint64_t { kCodes = 1, kZeros = 2, kScales = 3 };

constexpr uint64_t LayerNumber(int linear, LayerPart part, int64_t index) {
  return Mix((static_cast<uint64_t>(linear) << 56) ^ (static_cast<uint64_t>(part) << 48) ^
             static_cast<uint64_t>(index));
}

// Word `index` of qweight [K, N/8] or qzeros [G, N/8].
constexpr uint32_t LayerWord(int linear, LayerPart part, int64_t index) {
  return static_cast<uint32_t>(LayerNumber(linear, part, index));
}

// Bits of scale `index` of [G, N]: FP16, 0.0039 to 0.0117.
constexpr uint16_t LayerScale(int linear, int64_t index) {
  return static_cast<uint16_t>(0x1c00 + LayerNumber(linear, LayerPart::kScales, index) % 0x600);
}

// The nibble of a word that holds column `col` of its eight: AWQ stores 0 2 4 6 1 3 5 7.
constexpr int AwqNibble(uint32_t word, int64_t col) {
  const int j = static_cast<int>(col % 8);
  return static_cast<int>(word >> (4 * (j % 2 == 0 ? j / 2 : 4 + j / 2)) & 15);
}

}  // namespace awqd::testing
