// Rows of weights are bit for bit the formula's values, transformed and times the factor, for every
// element of every golden.
#include "client/tools/elements.h"

#include <gtest/gtest.h>

#include <bit>
#include <filesystem>
#include <string>
#include <vector>

#include "kernels/exact.h"
#include "kernels/formats/format.h"
#include "tests/testing/places.h"

namespace awqd::tools {
namespace {

int64_t WrongElements(const HostWeight& weight) {
  RowReader rows(&weight);
  std::vector<float> got(weight.n), values(weight.k * weight.n);
  for (int64_t i = 0; i < weight.k; ++i) {
    const int64_t row = weight.order.empty() ? i : weight.order[i];
    for (int64_t col = 0; col < weight.n; ++col) {
      values[row * weight.n + col] = WeightValue(weight, i, col);
    }
  }
  for (int64_t i = 0; i < weight.k && weight.hadamard.size > 0; i += weight.hadamard.size) {
    TransformBlock(weight.hadamard, &values[i * weight.n], weight.n);
  }
  int64_t wrong = 0;
  for (int64_t row = 0; row < weight.k; ++row) {
    rows.Read(row, got.data());
    for (int64_t col = 0; col < weight.n; ++col) {
      const float factor = weight.factor.empty() ? 1.0f : weight.factor[row];
      const float want = values[row * weight.n + col] * factor;
      wrong += std::bit_cast<uint32_t>(got[col]) != std::bit_cast<uint32_t>(want) ? 1 : 0;
    }
  }
  return wrong;
}

TEST(Elements, RowsOfEveryGolden) {
  int checked = 0;
  for (const Format* format : AllFormats()) {
    for (const auto& folder :
         std::filesystem::directory_iterator(DataPath(std::string(format->name)))) {
      if (!std::filesystem::exists(folder.path() / "config.json")) continue;
      const auto model = Model::Open(folder.path());
      ASSERT_TRUE(model.ok()) << model.status();
      ASSERT_TRUE(model->checkpoint().ok()) << model->checkpoint().status();
      for (const auto& linear : model->checkpoint()->linears()) {
        const auto elements = ReadElements(*model, linear.path);
        ASSERT_TRUE(elements.ok()) << elements.status();
        EXPECT_EQ(WrongElements(*elements->weight()), 0) << folder.path() << " " << linear.path;
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 60);
}

TEST(Elements, AnyColumnsAreThoseOfTheWhole) {
  const auto model = Model::Open(DataPath("gptq/v2-act"));
  ASSERT_TRUE(model.ok()) << model.status();
  const auto elements = ReadElements(*model, model->checkpoint()->linears()[0].path);
  ASSERT_TRUE(elements.ok()) << elements.status();
  const int64_t k = elements->k(), n = elements->n();
  std::vector<float> all(k * n);
  ASSERT_TRUE(elements->Read(0, n, all.data()).ok());
  for (int64_t begin = 0; begin < n; begin += 24) {
    const int64_t end = std::min(n, begin + 24), columns = end - begin;
    std::vector<float> some(k * columns);
    ASSERT_TRUE(elements->Read(begin, end, some.data()).ok());
    for (int64_t row = 0; row < k; ++row) {
      ASSERT_TRUE(std::equal(some.begin() + row * columns, some.begin() + (row + 1) * columns,
                             all.begin() + row * n + begin));
    }
  }
}

}  // namespace
}  // namespace awqd::tools
