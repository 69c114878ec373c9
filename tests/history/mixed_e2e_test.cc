// Good and bad calls of every kind, mixed, from several clients that also reload the models: each
// call ends as it must, right answers have the right bits, and the server's host and GPU memory at
// the end is no more than when it was warm.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/e2e/server_process.h"
#include "tests/e2e/synthetic_awq.h"

namespace awqd {
namespace {

using absl::StatusCode;
using client::Tensor;

constexpr int kModels = 4, kTokens = 16, kParts = 3;
constexpr int64_t kK = 256, kN = 64;
constexpr int64_t kRowBytes = kN * 2;

// AWQD_TEST_MIXED_CALLS; by default a million with AWQD_TEST_LONG, else 20,000.
int64_t Calls() {
  const char* text = std::getenv("AWQD_TEST_MIXED_CALLS");
  int64_t number = 0;
  if (text != nullptr && absl::SimpleAtoi(text, &number)) return number;
  return std::getenv("AWQD_TEST_LONG") != nullptr ? 1'000'000 : 20'000;
}

// AWQD_TEST_MIXED_CLIENTS; by default eight.
int Clients() {
  const char* text = std::getenv("AWQD_TEST_MIXED_CLIENTS");
  int number = 0;
  return text != nullptr && absl::SimpleAtoi(text, &number) ? number : 8;
}

// The number of calls before memory is first measured. Caches of the allocator and of gRPC fill up
// over the first 100,000 or so: a tenth of a million, half of fewer.
int64_t WarmUp(int64_t calls) {
  return std::min<int64_t>(calls / 2, std::max<int64_t>(calls / 10, 100'000));
}

// The allowed growth until the end.
int64_t MayGrow(int64_t calls, int64_t bytes) { return bytes / (calls < 1'000'000 ? 50 : 100); }

class MixedTest : public ::testing::Test {
 protected:
  MixedTest() {
    for (int model = 0; model < kModels; ++model) {
      Weight(model).Write(repository_ / Name(model));
      packed_[model] = Weight(model).ToPacked();
    }
    std::mt19937 engine(5);
    std::normal_distribution<float> normal;
    for (float& value : x_) value = normal(engine);
  }

  static SyntheticAwq Weight(int model) { return SyntheticAwq::Random(kK, kN, 64, 40 + model); }
  static std::string Name(int model) { return absl::StrCat("m", model); }

  Tensor Rows(int first, int tokens) const {
    return *Tensor::FromFloats(
        v1::FP16, {tokens, kK},
        std::vector<float>(x_.begin() + first * kK, x_.begin() + (first + tokens) * kK));
  }

  // Records the answer of one token at a time, without other calls.
  void LearnAnswers(client::Client& client) {
    for (int model = 0; model < kModels; ++model) {
      for (int token = 0; token < kTokens; ++token) {
        const auto y = client.QuantizedMatmul(Named(model, token, 1));
        ASSERT_TRUE(y.ok()) << y.status();
        right_[model] += y->output.bytes;
      }
      const auto weight = client.Dequantize({.weight = client::WeightName{Name(model), "layer"}});
      ASSERT_TRUE(weight.ok()) << weight.status();
      weights_[model] = weight->output.bytes;
    }
    ASSERT_NE(right_[0], right_[1]);
  }

  client::MatmulCall Named(int model, int first, int tokens) const {
    return {.weight = client::WeightName{Name(model), "layer"}, .activations = Rows(first, tokens)};
  }
  bool IsRight(const client::MatmulResult& y, int model, int first, int tokens) const {
    return y.output.bytes == right_[model].substr(first * kRowBytes, tokens * kRowBytes);
  }

  void Expect(bool holds, const std::function<std::string()>& what, std::atomic<int64_t>* count) {
    if (holds) return;
    if (++*count > 5) return;
    const std::lock_guard<std::mutex> lock(mu_);
    ADD_FAILURE() << what();
  }
  // Expects that a call ends with this code.
  void ExpectCode(const absl::Status& status, StatusCode code) {
    Expect(
        status.code() == code,
        [&] { return absl::StrCat("got ", status.ToString(), ", expected code ", int(code)); },
        &lost_);
  }
  template <typename Result>
  void ExpectAnswer(const absl::StatusOr<Result>& result,
                    const std::function<bool(const Result&)>& is_right) {
    ExpectCode(result.status(), StatusCode::kOk);
    if (!result.ok()) return;
    ++answered_;
    Expect(
        is_right(*result), [] { return "an answer with other bits"; }, &wrong_);
  }

  void Good(client::Client& client, int kind, int model, int first, int tokens) {
    const auto is_right = [&](const client::MatmulResult& y) {
      return IsRight(y, model, first, tokens);
    };
    client::MatmulCall call = Named(model, first, tokens);
    if (kind < 40) {
      ExpectAnswer<client::MatmulResult>(client.QuantizedMatmul(std::move(call)), is_right);
    } else if (kind < 48) {
      call.weight = packed_[model];
      ExpectAnswer<client::MatmulResult>(client.QuantizedMatmul(std::move(call)), is_right);
    } else if (kind < 53) {
      ExpectAnswer<client::DequantizeResult>(
          client.Dequantize({.weight = client::WeightName{Name(model), "layer"}}),
          [&](const client::DequantizeResult& all) { return all.output.bytes == weights_[model]; });
    } else if (kind < 56) {
      ExpectCode(client.GetModel(Name(model)).status(), StatusCode::kOk);
    } else if (kind < 58) {
      ExpectCode(client.ListModels().status(), StatusCode::kOk);
    } else {
      const std::lock_guard<std::mutex> lock(loads_[model]);  // one load of a model at a time
      ExpectCode(client.LoadModel(Name(model)).status(), StatusCode::kOk);
    }
  }

  void Bad(client::Client& client, int kind, int model, int first, int tokens) {
    client::MatmulCall call = Named(model, first, tokens);
    if (kind < 5) {
      call.activations = *Tensor::FromFloats(v1::FP16, {1, kK + 8}, std::vector<float>(kK + 8));
      ExpectCode(client.QuantizedMatmul(std::move(call)).status(), StatusCode::kInvalidArgument);
    } else if (kind < 10) {
      call.weight = client::WeightName{Name(model), "no\nlayer"};
      ExpectCode(client.QuantizedMatmul(std::move(call)).status(), StatusCode::kNotFound);
    } else if (kind < 15) {
      call.activations.bytes.pop_back();
      ExpectCode(client.QuantizedMatmul(std::move(call)).status(), StatusCode::kInvalidArgument);
    } else if (kind < 20) {
      v1::PackedWeight cut = packed_[model];
      cut.mutable_qweight()->mutable_raw()->resize(100);
      call.weight = std::move(cut);
      ExpectCode(client.QuantizedMatmul(std::move(call)).status(), StatusCode::kInvalidArgument);
    } else if (kind < 24) {
      // A new name each time, because a name that another client tries is reported as loading.
      const std::string name = absl::StrCat("no-such-model-", attempts_++);
      ExpectCode(client.LoadModel(name).status(), StatusCode::kNotFound);
    } else if (kind < 28) {
      // The deadline passes at any moment before the answer, or just after it.
      const auto y = client.QuantizedMatmul(std::move(call),
                                            {.timeout = absl::Microseconds(100 * (kind - 23))});
      if (y.ok()) {
        ExpectAnswer<client::MatmulResult>(
            y, [&](const client::MatmulResult& y) { return IsRight(y, model, first, tokens); });
      } else {
        // A deadline that cannot be met is refused when it comes.
        const bool refused = y.status().code() == StatusCode::kResourceExhausted;
        ExpectCode(y.status(),
                   refused ? StatusCode::kResourceExhausted : StatusCode::kDeadlineExceeded);
      }
    } else {
      Stream(client, model, first, tokens);
    }
  }

  // A good request, a bad one, and one whose client does not wait.
  void Stream(client::Client& client, int model, int first, int tokens) {
    const auto stream = client.QuantizedMatmulStream({.timeout = absl::Seconds(60)});
    client::MatmulCall good = Named(model, first, tokens), bad = Named(model, first, tokens);
    good.request_id = "good";
    bad.request_id = "bad";
    bad.weight = client::WeightName{"no-such-model", "layer"};
    ExpectCode(stream->Send(std::move(good)), StatusCode::kOk);
    ExpectCode(stream->Send(std::move(bad)), StatusCode::kOk);
    for (int i = 0; i < 2; ++i) {
      const auto answer = stream->Receive();
      ExpectCode(answer.status(), StatusCode::kOk);
      if (!answer.ok() || !answer->has_value()) return;
      if ((*answer)->request_id == "bad") {
        ExpectCode((*answer)->result.status(), StatusCode::kNotFound);
      } else {
        ExpectAnswer<client::MatmulResult>((*answer)->result, [&](const client::MatmulResult& y) {
          return IsRight(y, model, first, tokens);
        });
      }
    }
    (void)stream->Send(Named(model, first, tokens));
    stream->Cancel();
  }

  // Calls until `calls` calls have begun in all.
  void Act(int number, client::Client& client, int64_t calls) {
    std::mt19937 engine(number + 1 + static_cast<int>(begun_));
    const auto choose = [&](int below) { return static_cast<int>(engine() % below); };
    while (begun_.fetch_add(1) < calls) {
      const int kind = choose(100), model = choose(kModels), tokens = 1 + choose(4);
      const int first = choose(kTokens - tokens);
      if (kind < 60) {
        Good(client, kind, model, first, tokens);
      } else {
        Bad(client, kind - 60, model, first, tokens);
      }
    }
    --begun_;
  }
  void ActAll(ServerProcess& server, int64_t calls) {
    std::vector<std::unique_ptr<client::Client>> clients;
    std::vector<std::thread> threads;
    for (int i = 0; i < Clients(); ++i) clients.push_back(server.NewClient());
    for (int i = 0; i < Clients(); ++i)
      threads.emplace_back([&, i] { Act(i, *clients[i], calls); });
    for (std::thread& thread : threads) thread.join();
  }

  // Resident bytes at rest: the least value, once it has not decreased for two seconds.
  static int64_t AtRest(const ServerProcess& server) {
    int64_t least = server.rss_bytes();
    absl::Time since = absl::Now();
    while (absl::Now() - since < absl::Seconds(2)) {
      absl::SleepFor(absl::Milliseconds(50));
      const int64_t now = server.rss_bytes();
      if (now < least) {
        least = now;
        since = absl::Now();
      }
    }
    return least;
  }

  // Bytes in use on the server's GPU, by all processes; 0 on a CPU.
  static int64_t DeviceBytes(const ServerProcess& server) {
    const auto info = server.NewClient()->GetServerInfo();
    if (!info.ok() || info->devices_size() != 1) {
      ADD_FAILURE() << info.status() << ", expected one device";
      return 0;
    }
    const v1::DeviceStatus& device = info->devices(0);
    return device.arch() == 0 ? 0 : device.memory_total_bytes() - device.memory_free_bytes();
  }

  TempFolder repository_;
  std::vector<float> x_ = std::vector<float>(kTokens * kK);
  v1::PackedWeight packed_[kModels];
  std::string right_[kModels], weights_[kModels];  // FP16 [kTokens, kN], FP16 [kK, kN]
  std::mutex loads_[kModels], mu_;
  std::atomic<int64_t> begun_ = 0, answered_ = 0, wrong_ = 0, lost_ = 0, attempts_ = 0;
};

TEST_F(MixedTest, EveryCallEndsAsItMustAndMemoryStays) {
  ServerProcess server(
      {"--model_repository=" + repository_.path(), "--keep_going", "--batch_invariant"});
  ASSERT_TRUE(server.WaitServing()) << server.log();
  ASSERT_NO_FATAL_FAILURE(LearnAnswers(*server.NewClient()));
  const int64_t calls = Calls();
  ActAll(server, WarmUp(calls));
  const int64_t before = AtRest(server), device_before = DeviceBytes(server);
  int64_t after = before;
  for (int part = 1; part <= kParts; ++part) {
    const int64_t begun = begun_;
    const absl::Time since = absl::Now();
    ActAll(server, WarmUp(calls) + (calls - WarmUp(calls)) * part / kParts);
    const double rate =
        static_cast<double>(begun_ - begun) / absl::ToDoubleSeconds(absl::Now() - since);
    after = AtRest(server);
    std::printf("%d calls: resident %d KiB, %d of them anonymous; %.0f calls a second\n",
                static_cast<int>(begun_.load()), static_cast<int>(after >> 10),
                static_cast<int>(server.anonymous_bytes() >> 10), rate);
    std::fflush(stdout);
  }
  const int64_t device_after = DeviceBytes(server);
  std::printf(
      "%d calls, %d answers compared, %d wrong, %d lost; resident %d KiB after %d calls, "
      "%d at the end (%+.2f %%); on the GPU %d and %d KiB\n",
      static_cast<int>(begun_.load()), static_cast<int>(answered_.load()),
      static_cast<int>(wrong_.load()), static_cast<int>(lost_.load()),
      static_cast<int>(before >> 10), static_cast<int>(WarmUp(calls)),
      static_cast<int>(after >> 10),
      100.0 * static_cast<double>(after - before) / static_cast<double>(before),
      static_cast<int>(device_before >> 10), static_cast<int>(device_after >> 10));
  EXPECT_EQ(begun_, calls);
  EXPECT_GT(answered_, calls / 4);
  EXPECT_EQ(wrong_, 0);
  EXPECT_EQ(lost_, 0);
  EXPECT_LE(after, before + MayGrow(calls, before));
  EXPECT_LE(device_after, device_before + MayGrow(calls, device_before));
  EXPECT_EQ(server.Stop().code, 0);
}

}  // namespace
}  // namespace awqd
