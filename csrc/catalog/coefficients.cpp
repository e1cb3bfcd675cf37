#include "catalog/coefficients.h"

#include <cstring>

#include "catalog/catalog.h"
#include "core/finalize.h"
#include "core/registry.h"

namespace lowbit {
namespace {

/// Calls fn with the registered type at an index.
template <class Fn, class... T>
void visit(int index, Types<T...>, const Fn& fn) {
  int i = 0;
  ((i++ == index ? fn(static_cast<T*>(nullptr)) : void()), ...);
}

}  // namespace

void prepare(Job& job, const double* hyper, int64_t step, double g_scale) {
  visit(job.rule, UpdateRules{}, [&]<class U>(U*) {
    const typename U::Coef coef = U::prepare(hyper, step, g_scale);
    static_assert(sizeof coef <= sizeof job.coef);
    std::memcpy(job.coef, &coef, sizeof coef);
  });
}

void finalize(Job& job, int round, bool keep) {
  visit(job.rule, UpdateRules{}, [&]<class U>(U*) {
    typename U::Coef coef;
    std::memcpy(&coef, job.coef, sizeof coef);
    int64_t digit[ExactSum::kBins];
    finalize_round<U>(round, job.totals, job.numel, job.numbers, keep, digit, coef);
    std::memcpy(job.coef, &coef, sizeof coef);
  });
}

void finalize_factor(const Job& job, int round) {
  const int k = rule_info(job.rule).grid_factor[round];
  FactorMove move{};
  visit(job.rule, UpdateRules{}, [&]<class U>(U*) {
    typename U::Coef coef;
    std::memcpy(&coef, job.coef, sizeof coef);
    move = factor_move<U>(k, coef);
  });
  constexpr int kWords = ExactSum::kWords;
  const Factor& factor = job.factor[k];
  const double cols = static_cast<double>(job.global_inner_cols),
               rows = static_cast<double>(job.global_inner_rows);
  if (job.global_inner_rows == 0 || job.global_inner_cols == 0) return;  // nothing has a mean
  for (int64_t b = 0; b < job.batches; ++b) {
    // The rows' new mean, from sums known to every rank with a part of the matrix: the rows' old
    // sum plus what was added, which is the sum over the columns. (A single matrix may be cut both
    // ways; its sum lies with the totals.)
    const int64_t* sums = factor.col_sums + b * (job.inner_cols + 1) * kWords;
    int64_t added[kWords] = {};
    for (int64_t c = 0; c < job.inner_cols; ++c) {
      float& mean = factor.col[b * job.inner_cols + c];
      mean = moved(mean, exact_value(sums + c * kWords) / rows, move.weight);
    }
    if (!job.one_matrix()) exact_merge_columns(sums, job.inner_cols, job.global_inner_rows, added);
    const double old = exact_value(sums + job.inner_cols * kWords) / rows;
    const int64_t* all = job.totals + (round * kMaxTotals + kGridTotal) * kWords;
    const double fresh = exact_value(job.one_matrix() ? all : added) / (rows * cols);
    const double mean = mean_of_rows(old, fresh, move);
    for (int64_t r = b * job.inner_rows; r < (b + 1) * job.inner_rows; ++r) {
      float& row = factor.row[r];
      row = moved(row, exact_value(factor.row_sums + r * kWords) / cols, move.weight);
      factor.scaled[r] = scaled_row(row, mean);
    }
  }
}

}  // namespace lowbit
