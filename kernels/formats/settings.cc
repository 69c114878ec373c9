// Readers of settings. Every number is checked against its range before anybody uses it.
#include "kernels/formats/settings.h"

#include <limits>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "kernels/base/text.h"

namespace awqd {
namespace {

using Kind = Setting::Kind;

constexpr size_t kMaxWordBytes = 64;  // of names of methods and versions, which errors repeat

bool IsText(const Setting& value) {
  return value.kind == Kind::kString || value.kind == Kind::kTyped;
}

// Whether it may be read as a number or as true and false.
bool IsLiteral(const Setting& value) {
  return value.kind == Kind::kLiteral || value.kind == Kind::kTyped;
}

std::string Shown(const Setting& value) {
  switch (value.kind) {
    case Kind::kObject:
      return "an object";
    case Kind::kList:
      return "a list";
    case Kind::kNull:
      return "null";
    case Kind::kString:
    case Kind::kLiteral:
    case Kind::kTyped:
      break;
  }
  const bool cut = value.text.size() > kMaxWordBytes;
  const std::string text = absl::CHexEscape(value.text.substr(0, kMaxWordBytes));
  return value.kind == Kind::kLiteral ? text : absl::StrCat("\"", text, cut ? "...\"" : "\"");
}

}  // namespace

absl::Status BadSetting(absl::string_view name, const Setting& got, absl::string_view expected) {
  return BadValue(name, Shown(got), expected);
}

absl::Status UnreadSetting(absl::string_view name, absl::string_view got,
                           absl::string_view expected) {
  return absl::UnimplementedError(BadValue(name, got, expected).message());
}

absl::Status UnreadWord(absl::string_view name, absl::string_view got,
                        absl::Span<const absl::string_view> expected) {
  return UnreadSetting(name, Quoted(got), OneOf(expected, "\""));
}

absl::Status Beneath(absl::string_view where, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(where, ".", status.message()));
}

std::string OneOf(absl::Span<const absl::string_view> words, absl::string_view quote) {
  std::string out;
  for (size_t i = 0; i < words.size(); ++i) {
    const absl::string_view before = i == 0 ? "" : i + 1 < words.size() ? ", " : " or ";
    absl::StrAppend(&out, before, quote, words[i], quote);
  }
  return out;
}

const Setting* FindSetting(const Setting& object, absl::string_view name) {
  const auto it = object.members.find(name);
  return it == object.members.end() || it->second.kind == Kind::kNull ? nullptr : &it->second;
}

std::vector<std::pair<absl::string_view, const Setting*>> MembersInOrder(const Setting& object) {
  std::vector<std::pair<absl::string_view, const Setting*>> out;
  const auto add = [&](absl::string_view name) {
    const Setting* const value = FindSetting(object, name);
    if (value != nullptr) out.emplace_back(name, value);
  };
  if (object.keys.empty()) {
    for (const auto& [name, value] : object.members) add(name);
  }
  for (const std::string& name : object.keys) add(name);
  return out;
}

Setting OnlySettings(const Setting& object, absl::Span<const absl::string_view> names) {
  Setting out;
  for (absl::string_view name : names) {
    const Setting* value = FindSetting(object, name);
    if (value != nullptr) out.members.emplace(name, *value);
  }
  return out;
}

absl::StatusOr<std::optional<int64_t>> ReadInteger(const Setting& object, absl::string_view name,
                                                   int64_t min, int64_t max,
                                                   absl::string_view other) {
  const Setting* value = FindSetting(object, name);
  const Setting* second = other.empty() ? nullptr : FindSetting(object, other);
  if (value != nullptr && second != nullptr && *value != *second) {
    return BadSetting(name, *value,
                      absl::StrCat("the same as ", other, ", or only one of the two"));
  }
  if (value == nullptr) value = second;
  if (value == nullptr) return std::optional<int64_t>();
  int64_t number = 0;
  if (!IsLiteral(*value) || !absl::SimpleAtoi(value->text, &number) || number < min ||
      number > max) {
    return BadSetting(name, *value,
                      max == std::numeric_limits<int64_t>::max()
                          ? absl::StrCat("a whole number of at least ", min)
                          : absl::StrCat("a whole number from ", min, " to ", max));
  }
  return std::optional<int64_t>(number);
}

absl::StatusOr<std::optional<bool>> ReadBool(const Setting& object, absl::string_view name) {
  const Setting* value = FindSetting(object, name);
  if (value == nullptr) return std::optional<bool>();
  if (IsLiteral(*value) && value->text == "true") return std::optional<bool>(true);
  if (IsLiteral(*value) && value->text == "false") return std::optional<bool>(false);
  return BadSetting(name, *value, "true or false");
}

absl::StatusOr<std::string> ReadWord(const Setting& object, absl::string_view name) {
  const Setting* value = FindSetting(object, name);
  if (value == nullptr) return std::string();
  if (!IsText(*value)) return BadSetting(name, *value, "a string");
  if (value->text.size() > kMaxWordBytes) {
    return BadSetting(name, *value, absl::StrCat("at most ", kMaxWordBytes, " bytes"));
  }
  return absl::AsciiStrToLower(value->text);
}

absl::Status CheckWord(const Setting& object, absl::string_view name,
                       std::initializer_list<absl::string_view> expected) {
  AWQD_ASSIGN_OR_RETURN(const std::string got, ReadWord(object, name));
  if (got.empty() || absl::c_linear_search(expected, got)) return absl::OkStatus();
  return UnreadWord(name, got, expected);
}

absl::StatusOr<std::vector<std::string>> ReadStrings(const Setting& object,
                                                     absl::string_view name) {
  std::vector<std::string> out;
  const Setting* value = FindSetting(object, name);
  if (value == nullptr) return out;
  if (value->kind != Kind::kList) return BadSetting(name, *value, "null or a list of strings");
  out.reserve(value->list.size());
  for (const Setting& entry : value->list) {
    if (!IsText(entry) || entry.text.empty()) {
      return BadSetting(name, entry, "a list of strings that are not empty");
    }
    out.push_back(entry.text);
  }
  return out;
}

absl::StatusOr<const Setting*> ReadObject(const Setting& object, absl::string_view name) {
  const Setting* value = FindSetting(object, name);
  if (value != nullptr && value->kind != Kind::kObject) {
    return BadSetting(name, *value, "null or an object");
  }
  return value;
}

absl::StatusOr<int64_t> ReadGroupSize(const Setting& object, absl::string_view other) {
  AWQD_ASSIGN_OR_RETURN(const auto size, ReadInteger(object, "group_size", -1,
                                                     std::numeric_limits<int64_t>::max(), other));
  if (size == 0) return BadValue("group_size", 0, "-1 (all of K) or at least 1");
  return size.value_or(0);
}

}  // namespace awqd
