"""LongLens with the transformers package: ``import longlens.integrations.huggingface`` registers what is ours there."""

try:
    import transformers as _transformers
except ImportError:
    raise ImportError("transformers is not installed: pip install 'longlens[hf]'") from None
if tuple(map(int, _transformers.__version__.split(".")[:2])) < (5, 22):
    _given = f"transformers must be of version 5.22 or newer, got {_transformers.__version__}"
    raise ImportError(f"{_given}: pip install --upgrade 'longlens[hf]'")

from longlens.integrations.huggingface.attention import configure as configure
from longlens.integrations.huggingface.inputs import LaSFeatureExtractor as LaSFeatureExtractor
from longlens.integrations.huggingface.inputs import make_tokenizer as make_tokenizer
from longlens.integrations.huggingface.models import LaSConfig as LaSConfig
from longlens.integrations.huggingface.models import LaSForCausalLM as LaSForCausalLM
from longlens.integrations.huggingface.models import LaSForSequenceClassification as LaSForSequenceClassification
