// The bytes of a manifest: a header, a record of fixed size for each weight, and the texts of all.
#include "kernels/lending/manifest.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/digest.h"
#include "kernels/base/status.h"
#include "kernels/base/text.h"
#include "kernels/layouts/layout.h"

namespace awqd::lending {
namespace {

constexpr uint32_t kManifestMagic = 0x6d717761;  // "awqm"
constexpr uint32_t kManifestVersion = 3;
constexpr size_t kVersionBytes = 32;

// Its fields up to `layouts` keep their places in every version.
struct Header {
  uint32_t magic;
  uint32_t version;
  char awqd_version[kVersionBytes];
  uint64_t layouts;
  int64_t model_version;
  int64_t memory_bytes;
  uint64_t weights;
  uint64_t text_bytes;
};

struct Text {
  uint64_t offset;
  uint64_t bytes;
};

enum Flag : uint32_t { kOrder = 1, kFactor = 2, kBias = 4, kLargeScales = 8 };
constexpr uint32_t kFlags = kOrder | kFactor | kBias | kLargeScales;

struct Record {
  Text path, format, layout, scheme;
  int64_t k, n;
  int64_t offset, bytes;
  int64_t hadamard_size;
  float hadamard_scale;
  float activation_scale;
  uint32_t activations;
  uint32_t flags;
  int64_t scale_octaves;
  uint64_t digest;
  int64_t whole_k, whole_n, row_begin, col_begin;
};
static_assert(std::is_trivially_copyable_v<Header> && std::is_trivially_copyable_v<Record>);
static_assert(sizeof(Record) == 168 && sizeof(Header) == 80);

template <typename T>
void Append(const T& value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// No float has more octaves.
constexpr int64_t kMostOctaves = 512;
// K and N; the product of two with 8 bits each passes no int64_t.
constexpr int64_t kMostFeatures = int64_t{1} << 28;

absl::Status CheckRange(absl::string_view name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return BadValue(name, value, absl::StrCat(least, " to ", most));
}

absl::StatusOr<std::string> ReadText(absl::string_view name, Text text, absl::string_view texts) {
  if (text.offset <= texts.size() && text.bytes <= texts.size() - text.offset) {
    return std::string(texts.substr(text.offset, text.bytes));
  }
  return BadValue(name, absl::StrCat(text.bytes, " bytes at ", text.offset),
                  absl::StrCat("a range of ", texts.size(), " bytes"));
}

absl::StatusOr<LentWeight> ReadWeight(const Record& record, absl::string_view texts,
                                      int64_t memory_bytes) {
  LentWeight out;
  AWQD_ASSIGN_OR_RETURN(out.format, ReadText("format", record.format, texts));
  AWQD_ASSIGN_OR_RETURN(out.layout, ReadText("layout", record.layout, texts));
  AWQD_ASSIGN_OR_RETURN(const std::string scheme, ReadText("scheme", record.scheme, texts));
  AWQD_ASSIGN_OR_RETURN(out.shape.scheme, ParseScheme(scheme));
  AWQD_RETURN_IF_ERROR(CheckRange("k", record.k, 1, kMostFeatures));
  AWQD_RETURN_IF_ERROR(CheckRange("n", record.n, 1, kMostFeatures));
  AWQD_RETURN_IF_ERROR(Validate(out.shape.scheme, record.k, record.n));
  AWQD_RETURN_IF_ERROR(CheckRange("scale_octaves", record.scale_octaves, 0, kMostOctaves));
  AWQD_RETURN_IF_ERROR(CheckRange("flags", record.flags, 0, kFlags));
  AWQD_RETURN_IF_ERROR(CheckRange("activations", record.activations, 0,
                                  static_cast<int>(ActivationQuantization::kFloat8Static)));
  out.shape.k = record.k;
  out.shape.n = record.n;
  out.shape.scale_octaves = static_cast<int>(record.scale_octaves);
  out.shape.large_scales = (record.flags & kLargeScales) != 0;
  out.order = (record.flags & kOrder) != 0;
  out.factor = (record.flags & kFactor) != 0;
  out.bias = (record.flags & kBias) != 0;
  out.hadamard = {record.hadamard_size, record.hadamard_scale};
  AWQD_RETURN_IF_ERROR(Validate(out.hadamard, record.k));
  out.activations = {static_cast<ActivationQuantization>(record.activations),
                     record.activation_scale};
  AWQD_RETURN_IF_ERROR(CheckRange("bytes", record.bytes, 1, memory_bytes));
  AWQD_RETURN_IF_ERROR(CheckRange("offset", record.offset, 0, memory_bytes - record.bytes));
  if (record.offset % Sections::kAlign != 0) {
    return BadValue("offset", record.offset, absl::StrCat("a multiple of ", Sections::kAlign));
  }
  out.offset = record.offset;
  out.bytes = record.bytes;
  out.digest = record.digest;
  AWQD_RETURN_IF_ERROR(CheckRange("whole_k", record.whole_k, record.k, kMostFeatures));
  AWQD_RETURN_IF_ERROR(CheckRange("whole_n", record.whole_n, record.n, kMostFeatures));
  AWQD_RETURN_IF_ERROR(CheckRange("row_begin", record.row_begin, 0, record.whole_k - record.k));
  AWQD_RETURN_IF_ERROR(CheckRange("col_begin", record.col_begin, 0, record.whole_n - record.n));
  out.whole_k = record.whole_k;
  out.whole_n = record.whole_n;
  out.row_begin = record.row_begin;
  out.col_begin = record.col_begin;
  return out;
}

// No two weights share a byte, and none a path.
absl::Status CheckApart(const std::vector<LentWeight>& weights) {
  std::vector<const LentWeight*> sorted;
  for (const LentWeight& weight : weights) sorted.push_back(&weight);
  const auto compare = [&](auto before, auto collide, absl::string_view what) -> absl::Status {
    absl::c_sort(sorted, before);
    for (size_t i = 1; i < sorted.size(); ++i) {
      if (!collide(*sorted[i - 1], *sorted[i])) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("weight ", Quoted(sorted[i]->path), ": got the ", what, " of ",
                       Quoted(sorted[i - 1]->path), ", expected one of its own"));
    }
    return absl::OkStatus();
  };
  AWQD_RETURN_IF_ERROR(compare(
      [](auto* a, auto* b) { return a->offset < b->offset; },
      [](const LentWeight& a, const LentWeight& b) { return b.offset - a.offset < a.bytes; },
      "memory"));
  return compare([](auto* a, auto* b) { return a->path < b->path; },
                 [](const LentWeight& a, const LentWeight& b) { return a.path == b.path; }, "path");
}

// A weight of this scheme whose bytes are all different from their neighbours.
HostWeight MakeSample(const QuantizationScheme& scheme, int64_t k, int64_t n) {
  HostWeight out = MakeEmpty({.k = k, .n = n, .scheme = scheme});
  uint32_t state = 1;
  const auto fill = [&state](std::vector<uint8_t>* part, uint8_t mask) {
    for (uint8_t& byte : *part)
      byte = static_cast<uint8_t>((state = state * 1664525 + 1013904223) >> 24) & mask;
  };
  // Codes fill their places but those of 3, 5, 6 and 7 bits, whose upper bits are 0.
  const int place = CodeBits(scheme), code = scheme.bits;
  uint8_t mask = 0xff;
  if (scheme.is_integer() && code < place) {
    mask = 0;
    for (int at = 0; at < 8; at += place) mask |= static_cast<uint8_t>(((1 << code) - 1) << at);
  }
  fill(&out.codes, mask);
  // Scales of any type with neither infinities nor NaN.
  fill(&out.scales, 0x3f);
  fill(&out.zeros, scheme.real_zeros() ? 0x3f : static_cast<uint8_t>((1 << scheme.bits) - 1));
  if (scheme.code == CodeKind::kTable) {
    out.table.resize(16);
    std::iota(out.table.begin(), out.table.end(), -8.0f);
  }
  std::iota(out.outer.begin(), out.outer.end(), 1.0f);
  return out;
}

}  // namespace

std::string NameForLease(const DeviceInfo& device) {
  return device.pci_bus_id.empty() ? "cpu" : device.pci_bus_id;
}

LentWeight Describe(std::string path, const DeviceWeight& weight, const WeightArena& arena) {
  return {.path = std::move(path),
          .format = weight.format,
          .layout = std::string(weight.layout->name),
          .shape = weight.shape,
          .order = weight.sections.Has(Part::kOrder),
          .factor = weight.sections.Has(Part::kFactor),
          .bias = weight.sections.Has(Part::kBias),
          .hadamard = weight.hadamard,
          .activations = weight.activations,
          .offset = static_cast<const uint8_t*>(weight.storage.data()) - arena.data(),
          .bytes = weight.bytes(),
          .digest = arena.DigestOf(weight),
          .whole_k = weight.shape.k,
          .whole_n = weight.shape.n};
}

std::string Print(const Manifest& manifest) {
  std::string texts, records;
  const auto add = [&texts](absl::string_view text) -> Text {
    const Text out = {texts.size(), text.size()};
    absl::StrAppend(&texts, text);
    return out;
  };
  for (const LentWeight& weight : manifest.weights) {
    Append(Record{.path = add(weight.path),
                  .format = add(weight.format),
                  .layout = add(weight.layout),
                  .scheme = add(ToString(weight.shape.scheme)),
                  .k = weight.shape.k,
                  .n = weight.shape.n,
                  .offset = weight.offset,
                  .bytes = weight.bytes,
                  .hadamard_size = weight.hadamard.size,
                  .hadamard_scale = weight.hadamard.scale,
                  .activation_scale = weight.activations.scale,
                  .activations = static_cast<uint32_t>(weight.activations.how),
                  .flags = (weight.order ? kOrder : 0u) | (weight.factor ? kFactor : 0u) |
                           (weight.bias ? kBias : 0u) |
                           (weight.shape.large_scales ? kLargeScales : 0u),
                  .scale_octaves = weight.shape.scale_octaves,
                  .digest = weight.digest,
                  .whole_k = weight.whole_k,
                  .whole_n = weight.whole_n,
                  .row_begin = weight.row_begin,
                  .col_begin = weight.col_begin},
           &records);
  }
  Header header = {.magic = kManifestMagic,
                   .version = kManifestVersion,
                   .awqd_version = {},
                   .layouts = manifest.layouts,
                   .model_version = manifest.model_version,
                   .memory_bytes = manifest.memory_bytes,
                   .weights = manifest.weights.size(),
                   .text_bytes = texts.size()};
  manifest.awqd_version.copy(header.awqd_version, kVersionBytes - 1);
  std::string out;
  Append(header, &out);
  return absl::StrCat(out, records, texts);
}

absl::StatusOr<Manifest> Parse(absl::string_view text, absl::string_view awqd_version) {
  Header header;
  if (text.size() < sizeof(header)) {
    return BadValue("manifest", absl::StrCat(text.size(), " bytes"),
                    absl::StrCat("at least ", sizeof(header)));
  }
  std::memcpy(&header, text.data(), sizeof(header));
  if (header.magic != kManifestMagic) return BadValue("manifest", "none of awqd's", "one");
  Manifest out;
  out.awqd_version.assign(header.awqd_version, strnlen(header.awqd_version, kVersionBytes));
  out.layouts = header.layouts;
  const uint64_t layouts = LayoutsDigest();
  if (header.version != kManifestVersion || out.awqd_version != awqd_version ||
      out.layouts != layouts) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "lender and borrower differ: got awqd %s (manifest %d, layouts %016x), expected %s "
        "(manifest %d, layouts %016x)",
        OneLine(out.awqd_version), header.version, out.layouts, awqd_version, kManifestVersion,
        layouts));
  }
  out.model_version = header.model_version;
  out.memory_bytes = header.memory_bytes;
  AWQD_RETURN_IF_ERROR(CheckRange("memory_bytes", out.memory_bytes, 1, int64_t{1} << 50));
  text.remove_prefix(sizeof(header));
  if (header.weights > text.size() / sizeof(Record) ||
      header.text_bytes != text.size() - header.weights * sizeof(Record)) {
    return BadValue(
        "manifest",
        absl::StrCat(header.weights, " weights and ", header.text_bytes, " bytes of texts"),
        absl::StrCat("what ", text.size(), " bytes hold"));
  }
  const absl::string_view texts = text.substr(header.weights * sizeof(Record));
  out.weights.reserve(header.weights);
  for (uint64_t i = 0; i < header.weights; ++i) {
    Record record;
    std::memcpy(&record, text.data() + i * sizeof(Record), sizeof(Record));
    AWQD_ASSIGN_OR_RETURN(std::string path, ReadText("path", record.path, texts));
    auto weight = ReadWeight(record, texts, out.memory_bytes);
    if (!weight.ok()) return Prefixed(absl::StrCat("weight ", Quoted(path)), weight.status());
    weight->path = std::move(path);
    out.weights.push_back(*std::move(weight));
  }
  AWQD_RETURN_IF_ERROR(CheckApart(out.weights));
  return out;
}

uint64_t LayoutsDigest() {
  static const uint64_t digest = [] {
    constexpr absl::string_view kSchemes[] = {
        "w1g64",       "w2g64z", "w3g128z",        "w4g128z",      "w5g32s+fp32",       "w6g64z",
        "w7g64z",      "w8cs",   "w8cs+1",         "w4g128s+bf16", "w8g128+int8*c",     "w4g64r",
        "w4g64o:bf16", "t4g64",  "e2m1g16+e4m3*t", "e2m1g32+e8m0", "e4m3b128x128+fp32", "iq3_s"};
    uint64_t out = 0;
    const auto add = [&out](absl::string_view bytes) {
      out = Xxh64(bytes.data(), bytes.size(), out);
    };
    for (const absl::string_view name : kSchemes) {
      const HostWeight weight = MakeSample(ParseScheme(name).value(), 512, 192);
      const WeightShape shape = ShapeOf(weight);
      for (const Layout* layout : AllLayouts()) {
        if (!layout->refuses(shape).empty()) continue;
        const Sections sections = SectionsOf(*layout, shape);
        std::vector<uint8_t> packed(sections.total());
        layout->pack(weight, {0, weight.n}, sections, packed.data());
        PackCommonParts(*layout, weight, sections, packed.data());
        add(layout->name);
        add(name);
        add({reinterpret_cast<const char*>(packed.data()), packed.size()});
      }
    }
    return out;
  }();
  return digest;
}

}  // namespace awqd::lending
