// A function of one tensor in Python: qtk::fake_quantize by a range that stays. A call of the operator itself converts
// six arguments by its schema, which takes longer than what is computed for a small tensor.

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <structmember.h>

#include <memory>
#include <vector>

#include "fake_quantize.h"

namespace qtk {
namespace {

// What the operator takes after the tensor.
struct Range {
  py::object general;  // the operator in Python, for tensors and modes of which only Python knows
  py::tuple arguments;
  Tensor scale;
  OptionalTensor zero_point;
  std::vector<int64_t> block_size;
  int64_t qmin, qmax;
};

struct BoundRange {
  PyObject_HEAD
  vectorcallfunc call;
  Range* range;
};

Tensor quantized(const Range& range, const Tensor& x) {
  py::gil_scoped_release released;
  return fake_quantize(x, range.scale, range.zero_point, range.block_size, range.qmin, range.qmax);
}

PyObject* call(PyObject* self, PyObject* const* given, size_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(count) == 1 && names == nullptr, "a bound range takes one tensor");
  const Range& range = *reinterpret_cast<BoundRange*>(self)->range;
  if (!THPVariable_CheckExact(given[0]) || at::impl::torch_function_mode_enabled()) {
    return range.general(py::handle(given[0]), *range.arguments).release().ptr();
  }
  return THPVariable_Wrap(quantized(range, THPVariable_Unpack(given[0])));
  END_HANDLE_TH_ERRORS
}

PyObject* make(PyTypeObject* type, PyObject* given, PyObject* names) {
  HANDLE_TH_ERRORS
  const auto arguments = py::reinterpret_borrow<py::tuple>(given);
  TORCH_CHECK_TYPE(arguments.size() == 6 && names == nullptr, "a bound range takes an operator and five arguments");
  auto range = std::make_unique<Range>(Range{
      arguments[0], arguments[py::slice(1, 6, 1)], arguments[1].cast<Tensor>(), arguments[2].cast<OptionalTensor>(),
      arguments[3].cast<std::vector<int64_t>>(), arguments[4].cast<int64_t>(), arguments[5].cast<int64_t>()});
  PyObject* made = type->tp_alloc(type, 0);
  if (made != nullptr) {
    reinterpret_cast<BoundRange*>(made)->call = call;
    reinterpret_cast<BoundRange*>(made)->range = range.release();
  }
  return made;
  END_HANDLE_TH_ERRORS
}

void release(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<BoundRange*>(self)->range;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(BoundRange, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(release)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, members},
    {0, nullptr}};

PyType_Spec spec{
    "qtk.BoundRange", sizeof(BoundRange), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};

PyModuleDef definition{PyModuleDef_HEAD_INIT, "qtk kernels", nullptr, -1, nullptr,
                       nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace qtk

#define QTK_INIT_OF(name) PyInit_##name
#define QTK_INIT(name) QTK_INIT_OF(name)

PyMODINIT_FUNC QTK_INIT(TORCH_EXTENSION_NAME)() {
  PyObject* module = PyModule_Create(&qtk::definition);
  PyObject* type = module == nullptr ? nullptr : PyType_FromSpec(&qtk::spec);
  if (type == nullptr || PyModule_AddObject(module, "BoundRange", type) < 0) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
