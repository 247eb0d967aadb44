# A service with heavy imports: Flask, SQLAlchemy, NumPy and much of the standard library. It answers with
# what does not depend on when and where it was started.
import asyncio, concurrent.futures, ctypes, decimal, difflib, email.mime.multipart, ftplib, html.parser  # noqa
import http.cookiejar, imaplib, logging.config, multiprocessing, pydoc, sqlite3, unittest, xml.etree.ElementTree  # noqa

import numpy
from flask import Flask
from sqlalchemy import Column, Integer, String, create_engine, func, select
from sqlalchemy.orm import Session, declarative_base

Base = declarative_base()


class Item(Base):
    __tablename__ = "items"
    id = Column(Integer, primary_key=True)
    name = Column(String)


engine = create_engine("sqlite://", connect_args={"check_same_thread": False})
Base.metadata.create_all(engine)
session = Session(engine)
session.add_all(Item(id=number, name=f"item {number}") for number in range(5000))
session.commit()
matrix = numpy.arange(4_000_000, dtype=numpy.int64).reshape(2000, 2000)
app = Flask(__name__)


@app.route("/")
def answer():
    count = session.scalar(select(func.count()).select_from(Item))
    return f"{count} {matrix.trace()}\n"


app.run(host="127.0.0.1", port=8080, threaded=False)
