// The entry points of this instruction set's build, as one table.
#include "rows.h"
#include "simd.h"

namespace efla {
namespace EFLA_ISA {
size_t forward_scratch(const Problem&, const Plan&);
void forward(const Problem&, const Plan&, const Task&, void*, unsigned*);
void decode(const Problem&, const Plan&, const Task&, unsigned*);
size_t backward_scratch(const Problem&, const Plan&);
void backward(const Problem&, const Plan&, const Task&, void*, unsigned*);
void reduce(const Problem&, const Plan&, int64_t, int64_t);
void norm_forward(const NormProblem&, int64_t, int64_t);
void norm_backward(const NormProblem&, int64_t);
void conv_forward(const ConvProblem&, int64_t);
void conv_backward(const ConvProblem&, int64_t);
void gate_forward(const GateProblem&, int64_t, int64_t);
void gate_backward(const GateProblem&, int64_t, int64_t);
void mixer_step(const MixerStep&, int64_t);
void products(const ProductsProblem&, int, int64_t, int64_t);
}  // namespace EFLA_ISA

#define EFLA_JOIN_(a, b) a##b
#define EFLA_JOIN(a, b) EFLA_JOIN_(a, b)
#define EFLA_TEXT_(a) #a
#define EFLA_TEXT(a) EFLA_TEXT_(a)

extern const Kernels EFLA_JOIN(kernels_, EFLA_ISA);
const Kernels EFLA_JOIN(kernels_, EFLA_ISA) = {
    EFLA_TEXT(EFLA_ISA),        EFLA_ISA::forward_scratch, EFLA_ISA::forward,       EFLA_ISA::decode,
    EFLA_ISA::backward_scratch, EFLA_ISA::backward,        EFLA_ISA::reduce,        EFLA_ISA::norm_forward,
    EFLA_ISA::norm_backward,    EFLA_ISA::conv_forward,    EFLA_ISA::conv_backward, EFLA_ISA::gate_forward,
    EFLA_ISA::gate_backward,    EFLA_ISA::mixer_step,      EFLA_ISA::products,
};

}  // namespace efla
