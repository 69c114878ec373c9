// Layout "plain": the parts as a HostWeight has them. Codes are [K, N], row-major, the least
// significant bits first along N; of vector codes they are blocks [K / 256, N], of a trellis tiles
// [K / 16, N / 16]. Scales and zeros are [groups, column blocks] as stored.
//
// It holds any legal weight. The oracle and the simple CUDA rows read it.
//
// Worked places, for a weight of [256, 128] with FP16 scales and stored zeros, groups of 128 rows.
// Bits `part bits` of the code, scale or zero of element (k, n) begin at bit `bit` of byte `byte`
// of a section. tests/kernels/layout_specification_test.cc compares these lines with packed bytes.
//
//   bits    k    n  part   part bits  section  byte  bit
//      4    0    1  code         0-3  codes       0    4
//      4    3    5  code         0-3  codes     194    4
//      2    3    5  code         0-1  codes      97    2
//      4  130    5  scale       0-15  scales    266    0
//      4  130    5  zero         0-3  zeros     133    0
#include <algorithm>
#include <cstring>

#include "kernels/layouts/layout.h"

namespace awqd {
namespace {

std::string Refuses(const WeightShape&) { return ""; }

void AddSections(const WeightShape& shape, Sections* sections) {
  const QuantizationScheme& d = shape.scheme;
  sections->Add(Part::kCodes, shape.code_rows() * shape.row_bytes());
  sections->Add(Part::kScales, shape.cells() * d.scale_bytes());
  sections->Add(Part::kZeros, shape.cells() * d.zero_bytes());
}

// Copies bytes [begin, end) of every row.
void CopyColumns(const std::vector<uint8_t>& in, int64_t rows, int64_t begin, int64_t end,
                 uint8_t* out) {
  const int64_t stride = static_cast<int64_t>(in.size()) / rows;
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(out + row * stride + begin, in.data() + row * stride + begin, end - begin);
  }
}

// Copies the cells of a part with one cell per column block, if the block's first column is in the
// range.
void CopyCells(const HostWeight& w, const std::vector<uint8_t>& in, ColumnRange columns,
               uint8_t* out) {
  if (in.empty()) return;
  const WeightShape shape = w.shape();
  const int64_t size = static_cast<int64_t>(in.size()) / shape.cells();
  const int64_t block = shape.block_cols();
  CopyColumns(in, shape.groups(), CeilDiv(columns.begin, block) * size,
              CeilDiv(columns.end, block) * size, out);
}

void Pack(const HostWeight& w, ColumnRange columns, const Sections& sections, uint8_t* out) {
  CopyColumns(w.codes, w.code_rows(), columns.begin * w.code_bits() / 8,
              CeilDiv(columns.end * w.code_bits(), 8), out + sections.offset(Part::kCodes));
  CopyCells(w, w.scales, columns, out + sections.offset(Part::kScales));
  CopyCells(w, w.zeros, columns, out + sections.offset(Part::kZeros));
}

void Unpack(const WeightShape&, const uint8_t* in, const Sections& sections, HostWeight* w) {
  const auto copy = [&](Part part, std::vector<uint8_t>* to) {
    std::copy_n(in + sections.offset(part), to->size(), to->begin());
  };
  copy(Part::kCodes, &w->codes);
  copy(Part::kScales, &w->scales);
  copy(Part::kZeros, &w->zeros);
}

}  // namespace

const Layout kPlainLayout = {"plain", Refuses, AddSections, Pack, Unpack};

}  // namespace awqd
