"""The student: batches in, trained weights out.

from student_trainer import DistillationConfig, DistillationTrainer, RemoteTeacher
"""

from student_trainer.config import DistillationConfig
from student_trainer.teachers.local import LocalTeacher
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.trainer import DistillationTrainer

__all__ = ["DistillationConfig", "DistillationTrainer", "LocalTeacher", "RemoteTeacher"]
