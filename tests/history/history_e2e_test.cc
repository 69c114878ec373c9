// Eight clients load, reload, unload and call the models of the real server, and the log of it all
// is checked: every answer has the bits of a version that was live during its call.
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/half.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"
#include "tests/history/history.h"

namespace awqd {
namespace {

using client::Tensor;
using history::Answer;
using history::Change;
using history::kNone;
using history::kWrong;

constexpr int kModels = 3, kVersions = 6, kClients = 8, kTokens = 24;
constexpr int64_t kK = 256, kN = 64;

// AWQD_TEST_HISTORY_SECONDS makes it longer.
absl::Duration Length() {
  const char* seconds = std::getenv("AWQD_TEST_HISTORY_SECONDS");
  int number = 20;
  if (seconds != nullptr && !absl::SimpleAtoi(seconds, &number)) number = 20;
  return absl::Seconds(number);
}

int64_t Now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

class HistoryTest : public ::testing::Test {
 protected:
  HistoryTest() {
    for (int model = 0; model < kModels; ++model) {
      for (int version = 1; version <= kVersions; ++version) {
        SyntheticAwq::Random(kK, kN, 64, model * 100 + version).Write(Shelf(model, version));
      }
      std::filesystem::copy(Shelf(model, 1), repository_ / Name(model));
    }
    std::mt19937 engine(11);
    std::normal_distribution<float> normal;
    for (float& value : x_) value = normal(engine);
  }

  static std::string Name(int model) { return absl::StrCat("m", model); }
  std::string Shelf(int model, int version) const {
    return shelf_ / absl::StrCat(model, "-", version);
  }
  // Replaces the model's folder by a copy of that version.
  void Place(int model, int version) const {
    const std::string fresh = shelf_ / absl::StrCat("fresh-", model), old = fresh + "-old";
    std::filesystem::copy(Shelf(model, version), fresh);
    std::filesystem::rename(repository_ / Name(model), old);
    std::filesystem::rename(fresh, repository_ / Name(model));
    std::filesystem::remove_all(old);
  }
  absl::StatusOr<std::string> Product(client::Client& client, int model, int first,
                                      int tokens) const {
    const std::vector<float> rows(x_.begin() + first * kK, x_.begin() + (first + tokens) * kK);
    auto y =
        client.QuantizedMatmul({.weight = client::WeightName{Name(model), "layer"},
                                .activations = *Tensor::FromFloats(v1::FP16, {tokens, kK}, rows)});
    if (!y.ok()) return y.status();
    return std::move(y->output.bytes);
  }
  // Records the answer of each version without other calls: all tokens, one at a time. Versions
  // differ.
  void LearnAnswers(client::Client& client) {
    for (int model = 0; model < kModels; ++model) {
      for (int version = 1; version <= kVersions; ++version) {
        Place(model, version);
        ASSERT_TRUE(client.LoadModel(Name(model)).ok());
        std::string& rows = right_[{model, version}];
        for (int token = 0; token < kTokens; ++token) {
          const auto row = Product(client, model, token, 1);
          ASSERT_TRUE(row.ok()) << row.status();
          rows += *row;
        }
        for (int other = 1; other < version; ++other) {
          ASSERT_NE(VersionOf(model, 0, 1, rows.substr(0, kN * 2)), other);
        }
        ExpectIsTheProduct(model, version, rows);
      }
      ASSERT_TRUE(client.UnloadModel(Name(model)).ok());
    }
  }
  // Compares with the weight as its definition decodes it, so that the recorded answers are right
  // as well.
  void ExpectIsTheProduct(int model, int version, const std::string& rows) const {
    const auto weight = SyntheticAwq::Random(kK, kN, 64, model * 100 + version);
    const auto y = *(Tensor{v1::FP16, {kTokens, kN}, rows}).ToFloats();
    const auto x = *Tensor::FromFloats(v1::FP16, {kTokens, kK}, x_)->ToFloats();
    for (int64_t column = 0; column < kN; ++column) {
      double sum = 0, size = 0;
      for (int64_t row = 0; row < kK; ++row) {
        const double term = static_cast<double>(x[row]) * HalfToFloat(weight.At(row, column));
        sum += term;
        size += std::abs(term);
      }
      // One rounding to FP16, and one for each weight if the kernel decodes to FP16.
      EXPECT_NEAR(y[column], sum, size / 1024) << "model " << model << ", column " << column;
    }
  }
  // The version that has these rows.
  int VersionOf(int model, int first, int tokens, const std::string& rows) const {
    for (int version = 1; version <= kVersions; ++version) {
      const auto found = right_.find({model, version});
      if (found == right_.end()) continue;
      if (found->second.substr(first * kN * 2, tokens * kN * 2) == rows) return version;
    }
    return kWrong;
  }

  // The actions of one client until `end`.
  void Act(int client_number, client::Client& client, absl::Time end) {
    std::mt19937 engine(client_number + 1);
    const auto choose = [&](int below) { return static_cast<int>(engine() % below); };
    while (absl::Now() < end) {
      const int model = choose(kModels), what = choose(100);
      if (what < 4) {
        Load(client, model, 1 + choose(kVersions));
      } else if (what < 5) {
        Unload(client, model);
      } else {
        const int tokens = 1 + choose(4);
        Call(client_number, client, model, choose(kTokens - tokens), tokens);
      }
    }
  }
  void Load(client::Client& client, int model, int version) {
    // The files of a load must not be replaced; calls and unloads go on.
    const std::lock_guard<std::mutex> lock(files_[model]);
    Place(model, version);
    Change change{Name(model), version, Now()};
    const absl::Status loaded = client.LoadModel(Name(model)).status();
    change.end = Now();
    Note(loaded, change);
  }
  void Unload(client::Client& client, int model) {
    Change change{Name(model), kNone, Now()};
    const absl::Status unloaded = client.UnloadModel(Name(model));
    change.end = Now();
    // There was nothing to unload, or it is being loaded.
    if (!absl::IsNotFound(unloaded) && !absl::IsFailedPrecondition(unloaded)) {
      Note(unloaded, change);
    }
  }
  void Call(int client_number, client::Client& client, int model, int first, int tokens) {
    Answer answer{Name(model), kWrong, Now(), 0, client_number};
    const auto rows = Product(client, model, first, tokens);
    answer.end = Now();
    if (rows.ok()) {
      answer.version = VersionOf(model, first, tokens, *rows);
    } else if (NotLoaded(rows.status())) {
      answer.version = kNone;
    } else {
      ADD_FAILURE() << rows.status();
    }
    const std::lock_guard<std::mutex> lock(log_);
    answers_.push_back(answer);
  }
  static bool NotLoaded(const absl::Status& status) {
    return absl::IsNotFound(status) || absl::IsFailedPrecondition(status) ||
           (absl::IsUnavailable(status) && absl::StrContains(status.message(), "still loading"));
  }
  void Note(const absl::Status& status, const Change& change) {
    EXPECT_TRUE(status.ok()) << status;
    const std::lock_guard<std::mutex> lock(log_);
    if (status.ok()) changes_.push_back(change);
  }

  TempFolder repository_, shelf_;
  std::vector<float> x_ = std::vector<float>(kTokens * kK);
  std::map<std::pair<int, int>, std::string> right_;  // FP16 [kTokens, kN] of (model, version)
  std::mutex files_[kModels], log_;
  std::vector<Change> changes_;
  std::vector<Answer> answers_;
};

TEST_F(HistoryTest, EveryAnswerIsOfAVersionThatWasLive) {
  ServerProcess server(
      {"--model_repository=" + repository_.path(), "--keep_going", "--batch_invariant"});
  ASSERT_TRUE(server.WaitServing()) << server.log();
  ASSERT_NO_FATAL_FAILURE(LearnAnswers(*server.NewClient()));
  changes_.clear();
  const absl::Time end = absl::Now() + Length();
  std::vector<std::unique_ptr<client::Client>> clients;
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) clients.push_back(server.NewClient());
  for (int i = 0; i < kClients; ++i) threads.emplace_back([&, i] { Act(i, *clients[i], end); });
  for (std::thread& thread : threads) thread.join();

  const auto wrong = history::Impossible(changes_, answers_);
  EXPECT_TRUE(wrong.empty()) << wrong.size() << " of " << answers_.size() << " answers:\n"
                             << absl::StrJoin(wrong.begin(),
                                              wrong.begin() + std::min<size_t>(wrong.size(), 20),
                                              "\n");
  int none = 0;
  for (const Answer& answer : answers_) none += answer.version == kNone ? 1 : 0;
  std::printf("%zu answers, %d of them \"not loaded\"; %zu loads and unloads\n", answers_.size(),
              none, changes_.size());
  EXPECT_GT(answers_.size(), 500u) << "there was something to check";
  EXPECT_GT(changes_.size(), 20u);
  EXPECT_LT(none, static_cast<int>(answers_.size()));
  EXPECT_EQ(server.Stop().code, 0);
}

}  // namespace
}  // namespace awqd
