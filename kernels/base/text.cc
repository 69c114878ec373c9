// Escaping by the general categories of Unicode 15: Cc, Cf, Zl, Zp, and Zs but for the space.
#include "kernels/base/text.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace awqd {
namespace {

struct Range {
  uint32_t first;
  uint32_t last;
};

// In ascending order.
constexpr Range kHidden[] = {
    {0x0000, 0x001f},   {0x007f, 0x00a0},   {0x00ad, 0x00ad},   {0x0600, 0x0605},
    {0x061c, 0x061c},   {0x06dd, 0x06dd},   {0x070f, 0x070f},   {0x0890, 0x0891},
    {0x08e2, 0x08e2},   {0x1680, 0x1680},   {0x180e, 0x180e},   {0x2000, 0x200f},
    {0x2028, 0x202f},   {0x205f, 0x2064},   {0x2066, 0x206f},   {0x3000, 0x3000},
    {0xfeff, 0xfeff},   {0xfff9, 0xfffb},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd},
    {0x13430, 0x1343f}, {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0001, 0xe0001},
    {0xe0020, 0xe007f}};

bool IsHidden(uint32_t code) {
  const Range* const range =
      std::lower_bound(std::begin(kHidden), std::end(kHidden), code,
                       [](const Range& range, uint32_t code) { return range.last < code; });
  return range != std::end(kHidden) && range->first <= code;
}

// A character and its length in UTF-8. 0 bytes: the text is not UTF-8.
struct Character {
  uint32_t code = 0;
  size_t bytes = 0;
};

Character DecodeFirst(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  uint32_t code = lead & (0x7f >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kLeast[bytes] || code > 0x10ffff || surrogate) return {};
  return {code, bytes};
}

}  // namespace

std::string OneLine(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character character = DecodeFirst(text);
    const size_t bytes = std::max<size_t>(character.bytes, 1);
    if (character.bytes == 0 || (bytes == 1 && IsHidden(character.code))) {
      out += absl::CHexEscape(text.substr(0, 1));
    } else if (IsHidden(character.code)) {
      out += character.code > 0xffff ? absl::StrFormat("\\U%08x", character.code)
                                     : absl::StrFormat("\\u%04x", character.code);
    } else {
      out.append(text.data(), bytes);
    }
    text.remove_prefix(bytes);
  }
  return out;
}

std::string Quoted(absl::string_view text, size_t max_bytes) {
  const bool cut = text.size() > max_bytes;
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, max_bytes)), cut ? "...\"" : "\"");
}

absl::string_view ClipUtf8(absl::string_view text, size_t limit) {
  if (text.size() <= limit) return text;
  while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xc0) == 0x80) --limit;
  return text.substr(0, limit);
}

void AddNote(absl::string_view text, std::string* note) {
  if (!text.empty()) absl::StrAppend(note, note->empty() ? "" : "; ", text);
}

std::string FormatBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

bool IsUtf8(absl::string_view text) {
  while (!text.empty()) {
    const Character character = DecodeFirst(text);
    if (character.bytes == 0 || character.code == 0) return false;
    text.remove_prefix(character.bytes);
  }
  return true;
}

}  // namespace awqd
