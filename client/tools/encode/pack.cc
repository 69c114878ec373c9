// Words of codes, biases, and settings that several targets have.
#include "client/tools/encode/pack.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/tools/elements.h"
#include "kernels/base/math.h"
#include "kernels/base/status.h"

namespace awqd::tools {
namespace {

constexpr int kBlock = 32;  // codes that fill `bits` words

// Words [bits, n] of codes [kBlock, n].
void PackBlock(const std::vector<uint8_t>& codes, int64_t n, int bits, uint32_t* to) {
  std::fill_n(to, bits * n, 0u);
  for (int code = 0; code < kBlock; ++code) {
    const int word = code * bits / 32, shift = code * bits % 32;
    const uint8_t* const from = codes.data() + code * n;
    for (int64_t col = 0; col < n; ++col) {
      to[word * n + col] |= static_cast<uint32_t>(from[col]) << shift;
    }
    if (shift + bits <= 32) continue;
    for (int64_t col = 0; col < n; ++col) {
      to[(word + 1) * n + col] |= static_cast<uint32_t>(from[col]) >> (32 - shift);
    }
  }
}

// Calls each(first, count, words) with rows of words [count, N] along K, in their order.
template <typename Each>
void ForEachBlock(const HostWeight& weight, Each each) {
  const int bits = weight.scheme.bits;
  const int64_t all = CeilDiv(weight.k * bits, 32);
  RowReader rows(&weight);
  std::vector<uint8_t> codes(kBlock * weight.n);
  std::vector<uint32_t> words(bits * weight.n);
  for (int64_t k = 0; k < weight.k; k += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, weight.k - k);
    if (count < kBlock) std::fill(codes.begin(), codes.end(), uint8_t{0});
    for (int64_t i = 0; i < count; ++i) rows.ReadCodes(k + i, codes.data() + i * weight.n);
    PackBlock(codes, weight.n, bits, words.data());
    const int64_t first = k / kBlock * bits;
    each(first, std::min<int64_t>(bits, all - first), words.data());
  }
}

}  // namespace

std::vector<uint32_t> DenseWords(absl::Span<const uint8_t> codes, int64_t rows, int64_t cols,
                                 int bits) {
  const int64_t row_words = CeilDiv(cols * bits, 32);
  std::vector<uint32_t> out(rows * row_words);
  for (int64_t row = 0; row < rows; ++row) {
    uint32_t* const to = out.data() + row * row_words;
    for (int64_t col = 0; col < cols; ++col) {
      const uint32_t code = codes[row * cols + col];
      const int64_t word = col * bits / 32;
      const int shift = static_cast<int>(col * bits % 32);
      to[word] |= code << shift;
      if (shift + bits > 32) to[word + 1] |= code >> (32 - shift);
    }
  }
  return out;
}

std::vector<uint8_t> WordsAlongRows(const HostWeight& weight) {
  const int64_t n = weight.n;
  std::vector<uint8_t> out(CeilDiv(weight.k * weight.scheme.bits, 32) * n * 4);
  ForEachBlock(weight, [&](int64_t first, int64_t count, const uint32_t* words) {
    std::memcpy(out.data() + first * n * 4, words, count * n * 4);
  });
  return out;
}

std::vector<uint8_t> WordsAlongRowsTransposed(const HostWeight& weight) {
  const int64_t n = weight.n, row_words = CeilDiv(weight.k * weight.scheme.bits, 32);
  std::vector<uint8_t> out(n * row_words * 4);
  ForEachBlock(weight, [&](int64_t first, int64_t count, const uint32_t* words) {
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(out.data() + (col * row_words + first + i) * 4, words + i * n + col, 4);
      }
    }
  });
  return out;
}

std::vector<uint8_t> BytesOf(absl::Span<const uint32_t> words) {
  std::vector<uint8_t> out(words.size() * sizeof(uint32_t));
  std::memcpy(out.data(), words.data(), out.size());
  return out;
}

std::string TypeName(DType dtype) {
  return dtype == DType::kFp16 ? "F16" : dtype == DType::kBf16 ? "BF16" : "F32";
}

std::vector<NewTensor> BiasOf(const HostWeight& weight, const EncodeOptions& options) {
  std::vector<NewTensor> out;
  if (weight.bias.empty()) return out;
  const DType type = FloatTypeNamed(options.bias_dtype);
  std::vector<uint8_t> bytes(weight.n * SizeOf(type));
  for (int64_t i = 0; i < weight.n; ++i) {
    if (type == DType::kFp32) {
      std::memcpy(bytes.data() + 4 * i, &weight.bias[i], 4);
    } else {
      const uint16_t half =
          type == DType::kFp16 ? FloatToHalf(weight.bias[i]) : FloatToBf16(weight.bias[i]);
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  out.push_back(MadeTensor("bias", options.bias_dtype, {weight.n}, std::move(bytes)));
  return out;
}

absl::StatusOr<int64_t> OneGroupSize(const FolderFacts& facts) {
  const std::pair<std::string, LinearFacts>* first = nullptr;  // with more groups than one
  for (const auto& linear : facts.linears) {
    if (linear.second.groups() > 1 && first == nullptr) first = &linear;
  }
  if (first == nullptr) return -1;
  for (const auto& [path, linear] : facts.linears) {
    if (linear.group_rows == first->second.group_rows) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("linear ", path, ": got groups of ", linear.group_rows, ", expected ",
                     first->second.group_rows, " as of ", first->first,
                     ": the format has one group_size for all"));
  }
  return first->second.group_rows;
}

absl::StatusOr<int> OneWidth(const FolderFacts& facts) {
  const auto& [first, of_first] = facts.linears.front();
  for (const auto& [path, linear] : facts.linears) {
    if (linear.bits == of_first.bits) continue;
    return absl::InvalidArgumentError(absl::StrCat("linear ", path, ": got codes of ", linear.bits,
                                                   " bits, expected ", of_first.bits, " as of ",
                                                   first, ": the format has one width for all"));
  }
  return of_first.bits;
}

nlohmann::ordered_json Quantizer(const FolderFacts& facts) {
  if (!facts.rtn) return nullptr;
  return {{"quantizer", {facts.search ? "awqd:rtn-search" : "awqd:rtn"}}};
}

}  // namespace awqd::tools
