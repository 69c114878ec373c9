// Strict JSON on top of nlohmann's event parser.
#include "kernels/checkpoint/containers/json.h"

#include <cstddef>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status.h"
#include "kernels/checkpoint/file.h"

namespace awqd::model {
namespace {

constexpr size_t kMaxValues = 1'000'000;  // of a document

class KeyCollector : public JsonEvents {
 public:
  KeyCollector(int max_depth, KeysInOrder* keys)
      : JsonEvents(max_depth, nullptr, kMaxValues), keys_(keys) {}

 private:
  // A value takes more memory in a document than the two bytes that it may have in a text.
  absl::Status CountValue() {
    if (++values_ <= kMaxValues) return absl::OkStatus();
    return Invalid("got more than ", kMaxValues, " values in JSON, the limit");
  }
  absl::Status StartObject() override {
    open_.push_back(keys_->size());
    keys_->emplace_back();
    return CountValue();
  }
  absl::Status StartArray() override { return CountValue(); }
  absl::Status Scalar(const uint64_t*, const std::string*) override { return CountValue(); }
  absl::Status Key(absl::string_view key) override {
    (*keys_)[open_.back()].emplace_back(key);
    return absl::OkStatus();
  }
  absl::Status EndObject() override {
    open_.pop_back();
    return absl::OkStatus();
  }

  KeysInOrder* const keys_;
  std::vector<size_t> open_;  // objects around the place that is read
  size_t values_ = 0;
};

constexpr int64_t kMaxTokenBytes = 8 << 20;

// A text as the parser reads it, one byte after the other. It ends where something is wrong with
// it.
class JsonText {
 public:
  explicit JsonText(NextPiece next) : next_(next) {}

  const absl::Status& status() const { return status_; }
  bool AtEnd() {
    if (at_ == piece_.size()) Advance();
    return at_ == piece_.size();
  }
  char front() const { return piece_[at_]; }
  void Pop() {
    CountToken(front());
    ++at_;
    if (token_bytes_ <= kMaxTokenBytes) return;
    End(Invalid("got a string or a number of more than ", kMaxTokenBytes, " bytes in JSON at byte ",
                before_ + static_cast<int64_t>(at_), ", the limit"));
  }

 private:
  void End(absl::Status status) {
    status_ = std::move(status);
    ended_ = true;
    piece_ = {};
    at_ = 0;
  }
  void Advance() {
    if (ended_) return;
    before_ += static_cast<int64_t>(piece_.size());
    absl::StatusOr<absl::string_view> piece = next_();
    if (!piece.ok()) return End(piece.status());
    piece_ = *piece;
    at_ = 0;
    ended_ = piece_.empty();
    // The parser takes a NUL for the end of its input and would not see what follows.
    if (const size_t nul = piece_.find('\0'); nul != piece_.npos) {
      End(Invalid("got a NUL byte in JSON at byte ", before_ + static_cast<int64_t>(nul)));
    }
  }
  // The parser holds a whole string or number, twice.
  void CountToken(char c) {
    ++token_bytes_;
    if (escaped_) {
      escaped_ = false;
    } else if (c == '"') {
      in_string_ = !in_string_;
      token_bytes_ = 0;
    } else if (in_string_) {
      escaped_ = c == '\\';
    } else if (c == ',' || absl::ascii_isspace(static_cast<unsigned char>(c))) {
      token_bytes_ = 0;
    }
  }

  const NextPiece next_;
  absl::Status status_;
  absl::string_view piece_;
  size_t at_ = 0;
  int64_t before_ = 0;  // bytes of the pieces before
  int64_t token_bytes_ = 0;
  bool in_string_ = false, escaped_ = false, ended_ = false;
};

struct JsonTextIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  char operator*() const { return text->front(); }
  JsonTextIterator& operator++() {
    text->Pop();
    return *this;
  }
  // Nothing is compared but with the end.
  friend bool operator==(const JsonTextIterator& at, const JsonTextIterator&) {
    return at.text->AtEnd();
  }

  JsonText* text;
};

}  // namespace

bool JsonEvents::Keep(absl::Status status) {
  if (status.ok()) status = CheckCancelled(cancelled_);
  if (status.ok()) return true;
  status_ = std::move(status);
  return false;
}

bool JsonEvents::Enter() {
  if (++depth_ <= max_depth_) return true;
  return Keep(Invalid("got JSON nested deeper than ", max_depth_, " levels, the limit"));
}

bool JsonEvents::start_object(size_t) {
  if (!Enter()) return false;
  keys_.emplace_back();
  return Keep(StartObject());
}

absl::StatusOr<bool> JsonEvents::IsNewKey(const std::string& key) {
  if (++open_keys_ > max_open_keys_) {
    return Invalid("got more than ", max_open_keys_, " keys in JSON objects, the limit");
  }
  return keys_.back().insert(key).second;
}

bool JsonEvents::key(string_t& value) {
  const absl::StatusOr<bool> fresh = IsNewKey(value);
  if (!fresh.ok()) return Keep(fresh.status());
  return Keep(*fresh ? Key(value) : Invalid("duplicate key ", Quoted(value)));
}

bool JsonEvents::end_object() {
  --depth_;
  open_keys_ -= keys_.back().size();
  keys_.pop_back();
  return Keep(EndObject());
}

bool JsonEvents::end_array() {
  --depth_;
  return Keep(EndArray());
}

bool JsonEvents::parse_error(size_t position, const std::string& token,
                             const nlohmann::detail::exception&) {
  return Keep(
      Invalid("not valid JSON in UTF-8 at byte ", position, " (near ", Quoted(token, 64), ")"));
}

absl::Status ParseJson(NextPiece next, JsonEvents* events) {
  JsonText text(next);
  nlohmann::json_sax<nlohmann::json>* const sax = events;
  const bool done =
      nlohmann::json::sax_parse(JsonTextIterator{&text}, JsonTextIterator{&text}, sax);
  if (!text.status().ok()) return text.status();
  if (!events->status().ok()) return events->status();
  return done ? absl::OkStatus() : absl::InvalidArgumentError("not valid JSON");
}

absl::Status ParseJson(absl::string_view text, JsonEvents* events) {
  return ParseJson([&] { return absl::StatusOr<absl::string_view>(std::exchange(text, {})); },
                   events);
}

std::optional<std::string> QuotePythonNumbers(absl::string_view text) {
  constexpr absl::string_view kNumbers[] = {"NaN", "Infinity", "-Infinity"};
  std::string out;
  size_t copied = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') {  // to the end of the string
      for (++i; i < text.size() && text[i] != '"'; ++i) i += text[i] == '\\' ? 1 : 0;
      continue;
    }
    for (const absl::string_view number : kNumbers) {
      if (!absl::StartsWith(text.substr(i), number)) continue;
      absl::StrAppend(&out, text.substr(copied, i - copied), "\"", number, "\"");
      copied = i + number.size();
      i = copied - 1;
      break;
    }
  }
  if (copied == 0) return std::nullopt;
  absl::StrAppend(&out, text.substr(copied));
  return out;
}

absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, int max_depth,
                                               KeysInOrder* keys) {
  const std::optional<std::string> quoted = QuotePythonNumbers(text);
  if (quoted) text = *quoted;
  KeysInOrder unused;
  KeyCollector rules(max_depth, keys == nullptr ? &unused : keys);
  AWQD_RETURN_IF_ERROR(ParseJson(text, &rules));
  nlohmann::json out =
      nlohmann::json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!out.is_object()) {
    return Invalid("got a JSON ", out.type_name(), ", expected an object");
  }
  return out;
}

}  // namespace awqd::model
