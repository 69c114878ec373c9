// Compares ParseMatmul with the generated parser on the same bytes; for a test and a fuzz target.
#pragma once

#include <string>
#include <vector>

#include "server/rpc/matmul_wire.h"

namespace awqd {

// `bytes` in pieces whose sizes come from `seed`: most short, some empty, some long.
inline std::vector<absl::string_view> InPieces(absl::string_view bytes, uint32_t seed) {
  std::vector<absl::string_view> pieces;
  while (!bytes.empty()) {
    seed = seed * 1664525u + 1013904223u;
    const uint32_t kind = seed >> 29;
    size_t size = (seed >> 16) % 7;
    if (kind == 0) size = 1 + (seed >> 8) % 4096;
    if (kind == 1) size = bytes.size();
    pieces.push_back(bytes.substr(0, size));
    bytes.remove_prefix(pieces.back().size());
  }
  return pieces;
}

// Empty, or how the two parsers differ.
inline std::string WireDifference(absl::string_view bytes, uint32_t seed) {
  v1::QuantizedMatmulRequest expected;
  const bool parses = expected.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  const std::vector<absl::string_view> pieces = InPieces(bytes, seed);
  MatmulMessage got;
  if (ParseMatmul(pieces, &got) != parses) {
    return parses ? "refuses what the generated parser accepts"
                  : "accepts what the generated parser refuses";
  }
  if (!parses) return "";
  v1::Tensor* x = got.request.mutable_activations();
  if (!expected.has_activations()) got.request.clear_activations();
  if (got.cut) {
    if (x->contents_case() != v1::Tensor::kRaw) return "cuts what is not the contents";
    if (!x->raw().empty()) return "leaves bytes beside a cut";
    if (got.cut->begin < 0 || got.cut->size < 0 ||
        got.cut->begin + got.cut->size > static_cast<int64_t>(bytes.size())) {
      return "cuts outside the message";
    }
    std::string* raw = x->mutable_raw();
    raw->resize(got.cut->size);
    CopyRange(pieces, *got.cut, raw->data());
  }
  if (got.request.SerializeAsString() == expected.SerializeAsString()) return "";
  return "parses to \"" + got.request.ShortDebugString() + "\" instead of \"" +
         expected.ShortDebugString() + "\"";
}

}  // namespace awqd
