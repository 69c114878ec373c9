// Setting: what a checkpoint's quantization_config, or a request, says about a weight. A small tree
// without any library of JSON, so that formats can read it.
//
// Readers return INVALID_ARGUMENT as "name: got ..., expected ...". A value that is null counts as
// absent.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/base/status.h"

namespace awqd {

struct Setting {
  enum class Kind {
    kObject,   // members
    kList,     // list
    kString,   // text
    kLiteral,  // text: a number, true or false, as JSON spells it
    kTyped,    // text: a value of a request's settings, a string, a number, true or false
    kNull,
  };
  Kind kind = Kind::kObject;
  std::string text;
  std::vector<Setting> list;
  std::map<std::string, Setting, std::less<>> members;
  // The names of an object's members as they follow one another in its file, for settings of which
  // the first that matches counts. Empty for others.
  std::vector<std::string> keys;

  static Setting Literal(int64_t number) { return {Kind::kLiteral, absl::StrCat(number)}; }
  static Setting Literal(bool value) { return {Kind::kLiteral, value ? "true" : "false"}; }
  static Setting String(std::string text) { return {Kind::kString, std::move(text)}; }
  static Setting Typed(std::string text) { return {Kind::kTyped, std::move(text)}; }

  friend bool operator==(const Setting&, const Setting&) = default;
};

// "name: got ..., expected ..."; what was got is escaped and cut.
absl::Status BadSetting(absl::string_view name, const Setting& got, absl::string_view expected);

// UNIMPLEMENTED in the same words: of what another format might read.
absl::Status UnreadSetting(absl::string_view name, absl::string_view got,
                           absl::string_view expected);

// The same for a word that is none of `expected`.
absl::Status UnreadWord(absl::string_view name, absl::string_view got,
                        absl::Span<const absl::string_view> expected);

// The error of a setting beneath `where`: "config_groups.group_0" before its name.
absl::Status Beneath(absl::string_view where, const absl::Status& status);

// "F16, BF16 or F32", each between `quote`.
std::string OneOf(absl::Span<const absl::string_view> words, absl::string_view quote = "");

// The member of that name, or null.
const Setting* FindSetting(const Setting& object, absl::string_view name);

// The members that are not null, as they follow one another in their file.
std::vector<std::pair<absl::string_view, const Setting*>> MembersInOrder(const Setting& object);

// An object of those members of `object` that have one of the names.
Setting OnlySettings(const Setting& object, absl::Span<const absl::string_view> names);

// A whole number from `min` to `max`. `other`: another name that writers use for the same; an error
// when both are there and differ.
absl::StatusOr<std::optional<int64_t>> ReadInteger(const Setting& object, absl::string_view name,
                                                   int64_t min, int64_t max,
                                                   absl::string_view other = "");
absl::StatusOr<std::optional<bool>> ReadBool(const Setting& object, absl::string_view name);
// A name of at most 64 bytes, in lower case; empty when absent.
absl::StatusOr<std::string> ReadWord(const Setting& object, absl::string_view name);
// Checks that a word is one of `expected` or absent. UNIMPLEMENTED else.
absl::Status CheckWord(const Setting& object, absl::string_view name,
                       std::initializer_list<absl::string_view> expected);
// The meaning of a word; nothing when absent. UNIMPLEMENTED for words without one.
template <typename T>
absl::StatusOr<std::optional<T>> ReadChoice(
    const Setting& object, absl::string_view name,
    std::initializer_list<std::pair<absl::string_view, T>> meanings) {
  AWQD_ASSIGN_OR_RETURN(const std::string word, ReadWord(object, name));
  if (word.empty()) return std::optional<T>();
  std::vector<absl::string_view> words;
  for (const auto& [text, meaning] : meanings) {
    if (word == text) return std::optional<T>(meaning);
    words.push_back(text);
  }
  return UnreadWord(name, word, words);
}
// A list of strings, none of them empty.
absl::StatusOr<std::vector<std::string>> ReadStrings(const Setting& object, absl::string_view name);
// Null when absent.
absl::StatusOr<const Setting*> ReadObject(const Setting& object, absl::string_view name);

// group_size: -1 (all of K) or at least 1; 0 when absent. 0 itself is refused.
absl::StatusOr<int64_t> ReadGroupSize(const Setting& object, absl::string_view other = "");

}  // namespace awqd
