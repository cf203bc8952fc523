// expected error: an Eigen matrix must be row-major
#include <vector>

#include <focus/eigen.hpp>
#include <focus/sinkhorn.hpp>

#if defined(FOCUS_TEST_MISUSE)
using matrix = Eigen::MatrixXf;  // column-major
#else
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
#endif

void balance(const matrix& scores, matrix& assignment, std::vector<float>& log_group_scale) {
  focus::sinkhorn(scores, assignment, log_group_scale);
}
